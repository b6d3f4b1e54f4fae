"""Adapters of a server of several models: whose they are, and that they outlive an unload of their model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kvasir.adapters import AdapterOption, AdapterScale
from kvasir.config import EngineOptions
from kvasir.errors import ConfigError, InvalidRequest, ModelNotFound
from kvasir.serve.app import create_app
from kvasir.serve.hosting.model_manager import ModelManager
from kvasir.serve.settings import ServeSettings
from tests.serve.shelf import Launcher, Shelf, offer, several
from tests.serve.test_adapters import written


@pytest.fixture
async def http(tmp_path):
    catalogue = ModelManager(
        Shelf([offer(name) for name in "ab"]), Launcher(), ServeSettings(lora_dirs=(tmp_path,)), keep_alive=60
    )
    await catalogue.start()
    transport = httpx.ASGITransport(create_app(catalogue))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        http.catalogue = catalogue  # type: ignore[attr-defined]
        yield http
    await catalogue.stop()


async def load(http, path: Path, name: str, model: str | None) -> httpx.Response:
    written(path, f"{model}-{name}")
    body = {"lora_name": name, "lora_path": f"{model}-{name}", "model": model}
    return await http.post("/v1/load_lora_adapter", json=body)


async def test_an_adapter_is_found_by_its_name_unless_two_models_have_it(http, tmp_path):
    assert (await load(http, tmp_path, "sql", "a")).status_code == 200
    assert await http.catalogue.means("sql") == await http.catalogue.means("a:sql") == ("a", "sql")
    assert (await load(http, tmp_path, "sql", "b")).status_code == 200
    assert await http.catalogue.means("b:sql") == ("b", "sql")
    with pytest.raises(InvalidRequest, match="2 models have an adapter 'sql'"):
        await http.catalogue.means("sql")
    listed = {model["id"]: model["parent"] for model in (await http.get("/v1/models")).json()["data"]}
    assert listed == {"a": None, "b": None, "a:sql": "a", "b:sql": "b"}
    tags = (await http.get("/api/tags")).json()["models"]
    assert [model["name"] for model in tags] == [*listed]
    one = (await http.get("/v1/models/b:sql")).json()
    assert (one["id"], one["parent"], one["root"]) == ("b:sql", "b", "b-sql")


async def test_adapters_are_loaded_again_with_their_model(http, tmp_path):
    await load(http, tmp_path, "sql", "a")
    await load(http, tmp_path, "gone", "a")
    await http.post("/api/generate", json={"model": "a", "keep_alive": 0})
    assert http.catalogue.loaded() == []
    (tmp_path / "a-gone" / "adapter_config.json").write_text("{")
    assert (await http.get("/v1/models/sql")).json()["parent"] == "a"
    async with http.catalogue.lease("a") as serving:
        assert [info.name for info in serving.front.adapters.known] == ["sql"]
    with pytest.raises(ModelNotFound):
        await http.catalogue.means("gone")


async def test_a_model_must_be_named_where_there_are_several(http, tmp_path):
    response = await load(http, tmp_path, "sql", None)
    assert response.status_code == 400 and "2 models are available" in response.text
    for name in ("sql", "a:sql", "c:sql"):
        body = {"model": name, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 404


async def test_adapters_of_a_modelfile_apply_and_are_not_listed(http, tmp_path):
    option = AdapterOption("own", written(tmp_path, "own"), always=True)
    offers: Shelf = http.catalogue._offers
    offers.set(replace(offer("a"), options=lambda: EngineOptions("a", lora=[option.text])))
    async with http.catalogue.lease("a") as serving:
        shelf = serving.front.adapters
        await shelf.load(AdapterOption("sql", written(tmp_path, "sql")))
        for chosen, names in ((None, ["own"]), ([AdapterScale("sql")], ["own", "sql"]), ([AdapterScale("own", 0)], [])):
            assert [info.name for info, _ in shelf.effective(chosen)] == names
        shelf.set_defaults({1: 2.0})
        assert shelf.effective(None) == [*zip(shelf.known, (1.0, 2.0), strict=True)]
        await shelf.unload("sql")
    assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["a", "b"]


async def test_adapters_that_the_server_gives_its_models(tmp_path):
    """They are known before their model is loaded, and stay away once they are unloaded."""
    given = {name: AdapterOption(name, written(tmp_path, name)) for name in ("sql", "math")}
    texts = [option.text for option in given.values()]
    one = offer("a", adapters=tuple(given.values()), options=lambda: EngineOptions("a", lora=texts))
    async with several(Launcher(), Shelf([one, offer("b")])) as catalogue:
        assert catalogue.loaded() == [] and await catalogue.means("sql") == ("a", "sql")
        assert [card.name for card in await catalogue.cards()] == ["a", "b", "sql", "math"]
        async with catalogue.lease("a", keep_alive=0) as serving:
            assert [info.name for info in serving.front.adapters.known] == ["sql", "math"]
            await serving.front.adapters.unload("sql")
        async with catalogue.lease("a") as serving:
            assert [info.name for info in serving.front.adapters.known] == ["math"]
        with pytest.raises(ModelNotFound):
            await catalogue.means("sql")


async def test_no_adapter_has_the_name_of_a_model(tmp_path):
    option = AdapterOption("b", written(tmp_path, "b"))
    catalogue = ModelManager(Shelf([offer("a", adapters=(option,)), offer("b")]), Launcher(), ServeSettings())
    with pytest.raises(ConfigError, match="a model and an adapter are both named 'b'"):
        await catalogue.start()
