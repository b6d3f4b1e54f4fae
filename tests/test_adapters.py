"""Adapters as options write them: ours, vLLM's, SGLang's and llama.cpp's."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.adapters import (
    AdapterOption,
    by_model,
    check_name,
    given_adapters,
    is_folder_name,
    of_model,
    parse_adapters,
)
from kvasir.config import EngineOptions, check
from kvasir.errors import ConfigError, InvalidRequest
from tests.examples import examples

KEYS = st.sampled_from(
    ["name", "path", "scale", "default", "pinned", "always", "own", "model", "lora_name", "lora_path"]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sql=loras/sql", [AdapterOption("sql", "loras/sql")]),
        ("org/sql=a:0.5", [AdapterOption("org/sql", "a", 0.5)]),
        ("sql=a=b", [AdapterOption("sql", "a=b")]),
        ("sql=c:d", [AdapterOption("sql", "c:d")]),
        ("qwen3:8b:sql=a:2", [AdapterOption("sql", "a", 2.0, model="qwen3:8b")]),
        (
            "/models/m:sql=a,b:sql=a",
            [AdapterOption("sql", "a", model="/models/m"), AdapterOption("sql", "a", model="b")],
        ),
        ("a.gguf:", [AdapterOption("a.gguf-", "a.gguf:", 1.0, 1.0)]),
        ("loras/sql.gguf", [AdapterOption("sql", "loras/sql.gguf", 1.0, 1.0)]),
        ("a.gguf,b.gguf:-2", [AdapterOption("a", "a.gguf", 1.0, 1.0), AdapterOption("b", "b.gguf", -2.0, -2.0)]),
        ('{"name": "x", "path": "p", "base_model_name": "b"}', [AdapterOption("x", "p")]),
        ('[{"lora_name": "x", "lora_path": "p", "pinned": true}]', [AdapterOption("x", "p", pinned=True)]),
    ],
)
def test_forms(text, expected):
    found = parse_adapters([text])
    assert list(found) == expected
    assert parse_adapters([option.text for option in found]) == found


@pytest.mark.parametrize(
    "text",
    [
        *("m:sql=", "m:x=a,m:x=b", '{"name": "x", "path": "p", "model": 1}'),
        *("", "sql=", ",", "a,", "{", "[1]", "a=b,a=c", "x=p:1e9", "[" * 10_000),
        *('{"path": "p"}', '{"name": "x"}', '{"name": "a b", "path": "p"}', '{"name": "x", "path": "p", "rank": 3}'),
        *('{"name": "x", "path": "p", "scale": "1"}', '{"name": "x", "path": "p", "scale": NaN}'),
    ],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError):
        check(EngineOptions("m", lora=[text]))


SYMBOLS = st.text(st.sampled_from('ab=:,.{}[]"#/ 01-eN\\\n\0é'), max_size=24)
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | SYMBOLS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | SYMBOLS, inner, max_size=4),
    max_leaves=8,
)


@examples(300)
@given(SYMBOLS | st.text() | VALUES.map(json.dumps))
def test_any_text_is_adapters_or_refused(text):
    try:
        found = parse_adapters([text])
    except ConfigError:
        return
    assert parse_adapters([option.text for option in found]) == found


def test_adapters_of_several_models():
    given = parse_adapters(["a:x=1", "org/b:tag:x=2", '{"name": "y", "path": "3", "model": "a:latest"}', "c:y=4"])
    x, y = AdapterOption("x", "1"), AdapterOption("y", "3")
    found = by_model(given, ["a", "org/b:tag", "c:latest", "d"])
    assert found == {
        "a": (x, y), "org/b:tag": (AdapterOption("x", "2"),), "c:latest": (AdapterOption("y", "4"),), "d": ()
    }  # fmt: skip
    assert of_model(given[:1], "path/of/a", "a") == of_model([x], "whatever", None) == (x,)


@pytest.mark.parametrize(
    ("text", "models", "message"),
    [
        ("x=1", ["a", "b"], r"'x' may be of any model.*: a, b \(give it as MODEL:NAME=PATH"),
        ("1.gguf", ["a", "b"], "may be of any model"),
        ("c:x=1", ["a", "b"], "is for the model 'c', and this server has several: a, b"),
        ("c:x=1", [], "those of the store, which get adapters by a Modelfile"),
    ],
)
def test_adapters_of_no_certain_model_are_refused(text, models, message):
    with pytest.raises(ConfigError, match=message):
        by_model(parse_adapters([text]), models)
    with pytest.raises(ConfigError, match="is for the model 'c', not for 'a'"):
        of_model(parse_adapters(["c:x=1"]), "a")


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a=b", "x" * 257, "a\n", "\ud800", None, 7])
def test_names(name):
    with pytest.raises(InvalidRequest):
        check_name(name)


def test_a_program_gives_names_and_paths():
    assert parse_adapters(given_adapters({"sql": "a:1"})) == (AdapterOption("sql", "a:1"),)
    assert given_adapters(["a=b"]) == ("a=b",) and given_adapters(None) == ()
    with pytest.raises(ConfigError):
        given_adapters(7)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "a..b", ".hidden", "-x", "a\\b", "", "a\0b", "~"])
def test_names_that_are_no_folder_of_their_own(name):
    assert not is_folder_name(name)


def test_a_plain_name_is_a_folder():
    assert is_folder_name("sql-v1.2_x")
