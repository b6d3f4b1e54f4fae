"""Values of options as people write them."""

from __future__ import annotations

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.quantities import parse_bytes, parse_format, parse_tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("8B", 8),
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("1.5 GiB", 3 << 29),
        ("512MB", 512 * 10**6),
        ("2k", 2048),
        ("1TiB", 1 << 40),
        ("-1", -1),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("text", "count"), [("4k", 4096), ("4K", 4096), ("1.5k", 1536), ("1m", 1 << 20), ("7", 7)])
def test_tokens(text, count):
    assert parse_tokens(text) == count


@given(st.integers(-(2**60), 2**60))
def test_numbers_alone_stay_exact(number):
    assert parse_bytes(str(number)) == parse_tokens(str(number)) == number


@pytest.mark.parametrize("text", ["", "k", "4 kk", "4GBs", "0.3", "1e3", "four", "0x10", "٤k" * 2])
def test_other_texts_are_refused(text):
    for parse in (parse_bytes, parse_tokens):
        with pytest.raises(typer.BadParameter):
            parse(text)


def test_formats_have_short_names():
    assert [parse_format(name) for name in ("bf16", "FP16", "f32", "auto", "int8")] == [
        *("bfloat16", "float16", "float32", "auto", "int8")
    ]


def test_a_wrong_size_is_an_error_of_usage_that_names_the_option():
    result = CliRunner().invoke(app, ["run", "kvasir-mini", "hi", "--kv-memory", "many"])
    assert result.exit_code == 2
    assert "--kv-memory" in result.output and "8GiB" in result.output
