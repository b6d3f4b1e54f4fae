"""Names of models, as files and as people write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest, quoted
from kvasir.store.names import Name, is_name, parse_name

PART = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,8}(\.[a-z0-9]{1,3})?", fullmatch=True)


@given(PART, PART, st.one_of(st.just(("", "")), st.tuples(st.just(""), PART), st.tuples(PART, PART)))
def test_a_name_is_read_as_it_is_written(model, tag, places):
    name = Name(model, tag, places[1], places[0])
    assert parse_name(str(name)) == name
    assert "/" not in name.key and parse_name(str(name).upper()).key == name.key
    assert not name.key.startswith(".") and len(name.key) < 250


@given(st.text(max_size=30))
def test_no_text_becomes_a_path_that_leads_elsewhere(text):
    if is_name(text):
        key = parse_name(text).key
        assert "/" not in key and "\0" not in key and key.strip(".") and ".." not in key
        assert parse_name(str(parse_name(text))) == parse_name(text)


@pytest.mark.parametrize(
    ("text", "shown", "repository"),
    [
        ("qwen3", "qwen3:latest", None),
        ("qwen3:0.6b", "qwen3:0.6b", None),
        ("Org/Repo-GGUF:Q4_K_M", "Org/Repo-GGUF:Q4_K_M", "Org/Repo-GGUF"),
        ("hf.co/org/repo", "hf.co/org/repo:latest", "org/repo"),
        ("https://huggingface.co/org/repo", "huggingface.co/org/repo:latest", "org/repo"),
        ("example.com/org/repo", "example.com/org/repo:latest", None),
    ],
)
def test_names_are_split_into_parts(text, shown, repository):
    assert (str(parse_name(text)), parse_name(text).repository) == (shown, repository)


def test_the_hub_is_where_a_namespace_is():
    keys = {parse_name(t).key for t in ("org/repo", "hf.co/org/repo:latest", "HUGGINGFACE.CO/Org/Repo")}
    assert len(keys) == 1 and parse_name("repo").key not in keys and parse_name("example.com/org/repo").key not in keys


@pytest.mark.parametrize(
    "text",
    ["", ":", "a:", ":b", "a b", "../x", "a/../b", "/a", "a/", "a/b/c/d", "a..b", "é", "x" * 97, "a:b:c", "-a", ".a"],
)
def test_invalid_names_are_refused(text):
    with pytest.raises(InvalidRequest, match=re.escape(quoted(text))) as error:
        parse_name(text)
    assert error.value.param == "model"
