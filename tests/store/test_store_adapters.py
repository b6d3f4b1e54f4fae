"""Adapters in the store: pulled, named in Modelfiles, and applied to all requests of a model, never merged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.adapters import AdapterOption, parse_adapters
from kvasir.cli.adapter_facts import adapter_path
from kvasir.cli.resolve import resolve
from kvasir.config import EngineOptions
from kvasir.errors import InvalidRequest, ModelFileError
from kvasir.serve.hosting.offers import StoreOffers
from kvasir.store.modelfile import Modelfile, parse_modelfile, write_modelfile
from kvasir.store.store import ModelStore
from kvasir.weights.find import find_model
from tests.store import made
from tests.store.hub import Hub, use
from tests.store.test_store import upload


@pytest.fixture
def store(tmp_path, monkeypatch) -> ModelStore:
    monkeypatch.setenv("KVASIR_MODELS", str(tmp_path / "store"))
    return ModelStore(any_path=True)


def test_an_adapter_of_the_hub_is_pulled_as_one(store, tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    use(hub, monkeypatch, tmp_path / "cache")
    made.adapter(hub.root / "org/sql")
    entry = store.pull("org/sql")
    hub.close()
    assert entry.is_adapter and entry.parent == "org/m" and entry.weights.size > 32
    assert (entry.details.family, entry.details.parameters, entry.details.quantization_level) == ("lora", 8, "F32")
    with pytest.raises(ModelFileError, match="an adapter, not a model"):
        resolve(EngineOptions("org/sql"))
    options, _ = resolve(EngineOptions("kvasir-mini", lora=["sql=org/sql:0.5"]))
    assert parse_adapters(options.lora or ()) == (AdapterOption("sql", entry.weights.path, 0.5),)
    assert store.model_info(entry)["config.r"] == 2
    assert str(adapter_path("org/sql")) == entry.weights.path and adapter_path("org/m") is None
    store.remove("org/sql")
    assert not any((store.root / "models").glob("org*"))


@pytest.mark.parametrize("path", ["none/such", "org/none", "kvasir-mini", "./x.gguf"])
def test_an_adapter_that_is_nowhere_is_refused(store, path):
    with pytest.raises(ModelFileError, match="no such file, folder or adapter"):
        resolve(EngineOptions("kvasir-mini", lora=[f"sql={path}"]))


def test_a_model_in_the_store_is_no_adapter(store, tmp_path):
    store.pull(str(made.gguf(tmp_path / "tiny.gguf")))
    with pytest.raises(ModelFileError, match="is a model"):
        resolve(EngineOptions("kvasir-mini", lora=["sql=tiny"]))


def test_a_modelfile_applies_adapters_to_all_requests(store, tmp_path):
    made.gguf(tmp_path / "tiny.gguf")
    first, second = made.adapter(tmp_path / "a"), made.gguf_adapter(tmp_path / "b.gguf")
    recipe = parse_modelfile("FROM ./tiny.gguf\nADAPTER ./a\nADAPTER ./b.gguf\nADAPTER ./a")
    assert recipe.adapters == ("./a", "./b.gguf", "./a") and parse_modelfile(write_modelfile(recipe)) == recipe
    plain = store.create("plain", replace(recipe, adapters=()), base=tmp_path)
    entry = store.create("own", recipe, base=tmp_path)
    assert [weights.path for weights in entry.adapters] == [str(first), str(second)]
    assert entry.digest != plain.digest and entry.size > plain.size and not entry.is_adapter
    given = parse_adapters(store.options(entry, EngineOptions("own", lora=["sql=x"])).lora or ())
    assert [(one.path, one.always) for one in given] == [("x", False), (str(first), True), (str(second), True)]
    child = store.create("child", Modelfile(("own",), adapters=(str(made.adapter(tmp_path / "c", 2)),)))
    assert [*child.adapters[:2]] == [*entry.adapters] and len(child.adapters) == 3
    first.rename(tmp_path / "gone")
    with pytest.raises(ModelFileError, match="no longer"):
        store.options(entry, EngineOptions("own"))


def test_uploads_are_an_adapter(store, tmp_path):
    store.pull(str(made.gguf(tmp_path / "tiny.gguf")))
    folder = made.adapter(tmp_path / "a")
    files = {file.name: upload(store, file.read_bytes()) for file in folder.iterdir()}
    entry = store.create("own", Modelfile(("tiny",)), adapter_files=files)
    assert len(entry.adapters) == 1 and entry.adapters[0].path.startswith(str(store.root / "models"))
    store.remove("own")
    assert not any((store.root / "models").glob("uploaded*")) and not any((store.root / "blobs").iterdir())


def test_models_and_adapters_are_not_confused(store, tmp_path):
    made.gguf(tmp_path / "tiny.gguf")
    made.adapter(tmp_path / "a")
    store.pull(str(made.gguf_adapter(tmp_path / "b.gguf")))
    for recipe, message in (
        (Modelfile(("./a",)), "FROM './a' is an adapter"),
        (Modelfile(("b",)), "FROM 'b' is an adapter"),
        (Modelfile(("./tiny.gguf",), adapters=("./tiny.gguf",)), "is a model, not an adapter"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            store.create("own", recipe, base=tmp_path)
    with pytest.raises(ModelFileError, match="--lora"):
        find_model(tmp_path / "a")


async def test_a_server_of_the_store_offers_no_adapters(store, tmp_path):
    store.pull(str(made.gguf(tmp_path / "tiny.gguf")))
    store.pull(str(made.adapter(tmp_path / "sql")))
    offers = StoreOffers(store, EngineOptions(""))
    assert [offer.name for offer in await offers.all()] == ["tiny:latest"]
    assert await offers.find("sql") == [None]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"base_model_name_or_path": 7}'])
def test_a_config_says_what_it_likes(store, tmp_path, content):
    path = made.adapter(tmp_path / "a")
    (path / "adapter_config.json").write_text(content)
    if content in ("{", "[]"):
        with pytest.raises(ModelFileError):
            store.pull(str(path))
    else:
        assert store.pull(str(path)).parent == ""


def test_pickled_adapters_are_never_read(store, tmp_path):
    path = made.adapter(tmp_path / "a")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ModelFileError, match="pickled"):
        store.pull(str(path))
