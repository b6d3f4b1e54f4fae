"""Amounts in words, and text from outside that reaches a terminal."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.cli.show import bytes_text, count_text, fitted, json_text, number_text, plain, print_table, wrapped


@given(st.text())
def test_no_control_character_gets_through(text):
    shown = plain(text)
    assert len(shown) == len(text)
    assert all(c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) for c in shown)
    assert all(a == b or b == "\ufffd" for a, b in zip(text, shown, strict=True))


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (2 << 50, "2048.0 TiB")],
)
def test_bytes_in_words(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (3_670_016, "3.67 M"), (7 * 10**9, "7.00 G")],
)
def test_counts_in_words(count, text):
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.5, "1,234"), (0.001234, "0.00123"), (12.34, "12.3"), (1e-12, "1e-12")],
)
def test_numbers_have_three_digits(value, text):
    assert number_text(value) == text


def test_json_has_strings_for_numbers_that_json_lacks():
    value = {"a": [1.5, float("nan"), float("inf")], 2: ("x", None)}
    assert json.loads(json_text(value)) == {"a": [1.5, "nan", "inf"], "2": ["x", None]}


def test_a_table_escapes_control_characters(capsys):
    print_table(("name", ">size"), [("[bold]not markup[/]", 1), ("\x1b[31mred\nline", 22)], "Title")
    shown = capsys.readouterr().out
    assert "[bold]not markup[/]" in shown and "\x1b" not in shown and "Title" in shown
    assert "red line" in shown


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four", ["one two three", "four"]),
        ("  /set NAME", ["  /set NAME"]),
        ("  /ab   what is set", ["  /ab   what is", "        set"]),
        ("  indented text here", ["  indented text", "  here"]),
        ("averylongword_thatdoesnotfit", ["averylongword_thatdoesnotfit"]),
        ("a\n\nb", ["a", "", "b"]),
        ("", [""]),
    ],
)
def test_lines_are_broken_between_words_and_continue_below_their_column(text, lines):
    assert wrapped(text, 17).split("\n") == lines


def test_text_for_a_file_is_not_broken():
    assert fitted("word " * 100, io.StringIO()) == "word " * 100
