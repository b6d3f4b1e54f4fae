"""Bodies at and beyond the edge: each is answered, or refused with a status of the dialect and the field's name."""

from __future__ import annotations

import json

import pytest

from tests.serve.dialects.errors import error_of
from tests.serve.dialects.hostile import knocking, send
from tests.serve.dialects.table import DEADLINE, LENGTH, SEED, STOP, TEMPERATURE, put

NAN, INFINITY = float("nan"), float("inf")
# Negative lengths and temperatures, and lengths beyond the context, mean something in some dialects.
WRONG = {
    LENGTH: (1.5, "many", [], NAN, INFINITY),
    TEMPERATURE: ("hot", [], NAN, INFINITY),
    SEED: (1.5, "many", [], NAN),
    STOP: (5, [5], [""], [["a"]], {"a": 1}, ["x"] * 100),
    DEADLINE: (0, -1, 86401, "5", True, NAN),
}
DEEP = b"[" * 500 + b"]" * 500
NO_OBJECT = (b"", b"{", b"[]", b'"a"', b"5", b"null", b"\xff", b'{"a": NaN', b"{'a': 1}", b"[" * 100_000)


@pytest.fixture(scope="module")
def http(server):
    with knocking(server) as http:
        yield http


def refused(http, row, body: object, status: int = 400):
    return error_of(row.path, send(http, row.path, body), status)


@pytest.mark.parametrize("name", WRONG)
def test_a_value_out_of_its_range_or_of_another_type_is_refused_by_its_name(http, row, name):
    for value in WRONG[name]:
        error = refused(http, row, row.request("ab", **{LENGTH: 3, name: value}))
        field = row.places[name]
        assert error.names(field) or error.names(field.split(".")[-1]) or error.names("the body"), (value, error)


def test_an_unknown_field_is_refused_by_name(http, row):
    for name in ("colour", "Stream", "max tokens", "__class__", ""):
        assert refused(http, row, {**row.request("ab"), name: 1}).names(name), name


def test_a_prompt_of_another_type_is_refused_by_its_name(http, row):
    for value in (5, True, {"a": 1}, [{}], [[None]], [{"role": 5, "content": 5}]):
        assert refused(http, row, {**row.request("ab"), row.prompt: value}).names(row.prompt), value


def test_a_prompt_that_is_empty_is_answered_or_refused_by_its_name(http, row):
    response = send(http, row.path, row.request("", **{LENGTH: 3}))
    assert response.status_code == 200 or error_of(row.path, response, 400).names(row.prompt)
    if row.is_chat:
        assert response.status_code == 200


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(http, row):
    body = put(row.request("x" * 600), "truncate", False) if row.path.startswith("/api/") else row.request("x" * 600)
    error = refused(http, row, body)
    assert "51" in error.message and "6" in error.message and "token" in error.message


def test_a_body_that_is_not_an_object_is_refused(http, row):
    for data in NO_OBJECT:
        refused(http, row, data)


def test_a_value_nested_too_deeply_is_refused(http, row):
    for name in (row.prompt, "tools", "nothing"):
        body = json.dumps({**row.request("ab"), name: "HERE"}).encode().replace(b'"HERE"', DEEP)
        assert "nested" in refused(http, row, body).message


def test_half_a_character_is_refused_or_replaced(http, row):
    for text in ("\ud800", "a\udfff", "\x00"):
        response = send(http, row.path, row.request(text, **{LENGTH: 3}))
        if response.status_code != 200:
            error_of(row.path, response, 400)


def test_a_number_of_many_digits_is_refused_in_few_words(http, row):
    body = json.dumps(row.request("ab", **{LENGTH: 12321})).encode().replace(b"12321", b"9" * 5000)
    assert len(refused(http, row, body).message) < 1000
