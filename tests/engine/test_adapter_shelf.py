"""The adapters of an engine as requests select them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvasir.adapters import AdapterOption, AdapterScale
from kvasir.engine.adapter_shelf import AdapterShelf, last_of
from kvasir.engine.fake import FakeEngine
from kvasir.errors import InvalidRequest, ModelNotFound
from kvasir.inputs import Adapter


def test_the_last_occurrence_is_that_of_a_plain_search():
    draw = random.Random(0)
    for _ in range(500):
        ids = [draw.randrange(3) << draw.choice((0, 8, 16)) for _ in range(draw.randrange(12))]
        wanted = [draw.randrange(3) << draw.choice((0, 8, 16)) for _ in range(draw.randrange(1, 4))]
        plain = [i for i in range(len(ids)) if ids[i : i + len(wanted)] == wanted]
        assert last_of(ids, wanted) == (plain[-1] if plain else None)
    assert last_of([1 << 40], [1]) is None


@pytest.fixture
async def engine():
    engine = FakeEngine()
    await engine.start()
    yield engine
    await engine.stop()


def written(folder: Path, name: str) -> AdapterOption:
    (folder / name).write_text(name)
    return AdapterOption(name, str(folder / name))


async def test_a_replaced_adapter_keeps_its_number_and_an_unloaded_one_gives_its_up(engine, tmp_path):
    shelf = AdapterShelf(engine, [written(tmp_path, name) for name in "abc"])
    await shelf.start()
    shelf.set_defaults({0: 1.0, 2: 3.0})
    await shelf.load(AdapterOption("a", written(tmp_path, "d").path, scale=0.5), replacing=True)
    assert [info.name for info in shelf.known] == ["a", "b", "c"]
    assert shelf.applied(None, (1,)) == (Adapter("c", 3.0),)  # what a default was set for is gone
    assert shelf.applied([AdapterScale("a")], (1,)) == (Adapter("a", 0.5),)
    await shelf.unload("b")
    assert shelf.numbered(1).name == "c"
    await shelf.unload("c")
    assert shelf.applied(None, (1,)) == () and shelf.default("c") == 0.0


async def test_the_summary_names_the_adapters(engine, tmp_path):
    shelf = AdapterShelf(engine, [written(tmp_path, str(i)) for i in range(10)])
    assert shelf.summary() == ()
    await shelf.start()
    shelf.set_defaults({9: 0.5})
    assert shelf.summary() == ("adapters  9 0.5 for all, 0, 1, 2, 3, 4, 5, 6, and 2 more",)


async def test_what_is_unknown_is_refused(engine, tmp_path):
    shelf = AdapterShelf(engine, [written(tmp_path, str(i)) for i in range(10)])
    await shelf.start()
    with pytest.raises(ModelNotFound, match="and 2 more"):
        shelf.applied([AdapterScale("x")], ())
    with pytest.raises(InvalidRequest, match="no adapter 10"):
        shelf.set_defaults({10: 1.0})
    with pytest.raises(ModelNotFound):
        await shelf.unload("x")
    with pytest.raises(InvalidRequest):
        await shelf.load(written(tmp_path, "0"))


async def test_a_thousand_adapters_cost_a_request_without_them_nothing(engine, tmp_path, monkeypatch):
    shelf = AdapterShelf(engine)
    monkeypatch.setattr(type(engine), "adapters", property(lambda self: pytest.fail("looked at")))
    assert shelf.applied(None, (1, 2)) == ()
