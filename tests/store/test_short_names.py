"""Short names: the package's table, a user's own, and quantizations."""

from __future__ import annotations

import pytest

from kvasir.cli.resolve import resolve
from kvasir.config import EngineOptions
from kvasir.errors import ConfigError, ModelFileError
from kvasir.store.names import parse_name
from kvasir.store.short_names import expand, known
from kvasir.store.store import ModelStore


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("kvasir.store.store.models_dir", lambda: tmp_path / "store")
    (tmp_path / "kvasir").mkdir()
    return tmp_path / "kvasir"


@pytest.mark.parametrize("name", known())
def test_every_name_leads_to_a_repository(name):
    place = parse_name(expand(name))
    assert place.repository
    assert expand(f"{name}:latest" if ":" not in name else name.upper()) == expand(name)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF:Q8_0"),
        ("qwen3", "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("Qwen3:Latest", "Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("qwen3:8b-q8_0", "Qwen/Qwen3-8B-GGUF:Q8_0"),
        ("qwen3:q6_k", "Qwen/Qwen3-8B-GGUF:Q6_K"),
        ("qwen3:9b", None),
        ("qwen3:8b-instruct", None),
        ("unknown", None),
        ("unknown:1b", None),
        ("org/name", None),
        ("", None),
    ],
)
def test_names(name, place):
    assert expand(name) == place


def test_a_users_file_extends_the_table(folder):
    (folder / "names.toml").write_text('"mine" = "org/Mine-GGUF:Q4_0"\n"qwen3" = "qwen3:0.6b"\n')
    assert expand("mine") == "org/Mine-GGUF:Q4_0"
    assert expand("qwen3") == "Qwen/Qwen3-0.6B-GGUF:Q8_0"
    assert expand("qwen3:4b") == "Qwen/Qwen3-4B-GGUF:Q4_K_M"


@pytest.mark.parametrize(
    "text", ["mine", '"mine" = 3', '"a/b" = "c/d"', '[mine]\nx = "y/z"', '"mine" = ""', b"\xff".decode("latin-1")]
)
def test_a_wrong_file_is_refused(folder, text):
    (folder / "names.toml").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"names\.toml"):
        expand("mine")


def test_names_that_lead_in_circles_are_refused(folder):
    (folder / "names.toml").write_text('"a" = "b"\n"b" = "a"\n')
    with pytest.raises(ConfigError, match="without end"):
        expand("a")


def test_a_name_may_stand_for_a_local_model_and_not_for_nothing(folder):
    (folder / "names.toml").write_text('"tiny" = "kvasir-mini"\n"file" = "/models/a.gguf"\n"none" = "nothing"\n')
    assert [expand(name) for name in ("tiny", "file")] == ["kvasir-mini", "/models/a.gguf"]
    with pytest.raises(ConfigError, match="leads to nothing, which is none"):
        expand("none")


def test_a_command_takes_a_short_name():
    options, entry = resolve(EngineOptions("qwen3:0.6b"))
    assert entry is None
    assert (options.model, options.served_model_name) == ("Qwen/Qwen3-0.6B-GGUF:Q8_0", "qwen3:0.6b")
    with pytest.raises(ModelFileError, match="short name"):
        resolve(EngineOptions("qwen99"))


def test_a_pulled_model_keeps_its_short_name(folder):
    (folder / "names.toml").write_text('"tiny" = "tiny:1"\n"tiny:1" = "org/none"\n')
    store = ModelStore()
    store.pull("kvasir-mini", "tiny")
    assert resolve(EngineOptions("tiny"))[1] == store.get("tiny"), "the store comes before short names"
