"""Engines load and unload adapters by name."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvasir.engine.fake import FakeEngine
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import InvalidRequest, ModelFileError, ModelNotFound
from kvasir.inputs import Adapter
from kvasir.types import Request, SamplingParams

OPTIONS: dict[str, Any] = {"max_loras": 2, "lora_memory": 1000}
ENGINES = {"in process": lambda: FakeEngine(**OPTIONS), "process": lambda: ProcessEngine(fake=OPTIONS)}


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]()


def written(folder: Path, name: str, size: int = 8) -> str:
    (folder / name).write_bytes(name.encode().ljust(size, b"."))
    return str(folder / name)


def run(engine, test) -> None:
    async def whole() -> None:
        await engine.start()
        try:
            await test()
        finally:
            await engine.stop()

    asyncio.run(whole())


def test_names_are_listed_in_the_order_of_loading(engine, tmp_path):
    async def test() -> None:
        for name in "bac":
            info = await engine.load_adapter(name, written(tmp_path, name))
            assert (info.name, info.path, info.nbytes) == (name, str(tmp_path / name), 8)
        again = await engine.load_adapter("a", written(tmp_path, "other"), replace=True)
        await engine.unload_adapter("b")
        assert [info.name for info in engine.adapters] == ["a", "c"] and engine.adapters[0] == again

    run(engine, test)


def test_refusals_say_what_was_wrong(engine, tmp_path):
    async def test() -> None:
        path = written(tmp_path, "a")
        await engine.load_adapter("a", path)
        with pytest.raises(InvalidRequest, match="'a' is loaded already"):
            await engine.load_adapter("a", path)
        with pytest.raises(ModelFileError, match="cannot be read"):
            await engine.load_adapter("b", str(tmp_path / "none"))
        with pytest.raises(ModelNotFound, match=r"'b' is not loaded.*loaded: 'a'"):
            await engine.unload_adapter("b")
        with pytest.raises(InvalidRequest, match="no name"):
            await engine.load_adapter("", path)
        with pytest.raises(ModelNotFound, match="'b' is not loaded"):
            request = Request("r", (1,), SamplingParams(max_tokens=1, seed=0), adapters=(Adapter("b"),))
            await anext(engine.submit(request))

    run(engine, test)


def test_pinned_adapters_fit_into_memory(engine, tmp_path):
    async def test() -> None:
        for name, size in (("a", 400), ("b", 400)):
            await engine.load_adapter(name, written(tmp_path, name, size), pinned=True)
        with pytest.raises(InvalidRequest, match="3 pinned adapters of 808 bytes"):
            await engine.load_adapter("c", written(tmp_path, "c"), pinned=True)
        await engine.load_adapter("b", written(tmp_path, "small"), pinned=True, replace=True)
        with pytest.raises(InvalidRequest, match="2 pinned adapters of 1100 bytes"):
            await engine.load_adapter("b", written(tmp_path, "large", 700), pinned=True, replace=True)

    run(engine, test)
