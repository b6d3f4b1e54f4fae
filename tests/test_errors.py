"""Messages quote what comes from outside in few, printable characters, whatever it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import MAX_MESSAGE, MAX_QUOTED, InvalidRequest, bounded, quoted

SCALARS = st.text() | st.integers() | st.binary() | st.floats() | st.none()
ANYTHING = st.recursive(SCALARS, lambda v: st.lists(v) | st.dictionaries(st.text(), v))


def readable(text: str) -> bool:
    return text.replace("\n", "").replace("\t", "").isprintable()


@given(ANYTHING, st.integers(80, 300))
def test_any_value_is_quoted_in_few_printable_characters(value, most):
    shown = quoted(value, most)
    assert len(shown) <= most and readable(shown)
    if isinstance(value, int | str) and len(repr(value)) <= 80:
        assert shown == repr(value)


@pytest.mark.parametrize(
    "value",
    ["\x1b[2J\u202e" * 35_000, 10**70_000, b"\0" * 70_000, ["x" * 70_000] * 9, {"y" * 70_000: 1}, [[[[[[[[[]]]]]]]]]],
    ids=lambda value: type(value).__name__,
)
def test_large_and_hostile_values(value):
    shown = quoted(value)
    assert 0 < len(shown) <= MAX_QUOTED and readable(shown)


@given(st.text(max_size=400), st.integers(1, 300))
def test_texts_are_bounded_once_and_for_all(text, repeats):
    shown = bounded(text * repeats)
    assert len(shown) <= MAX_MESSAGE and readable(shown)
    assert bounded(shown) == shown
    if readable(text) and len(text) * repeats <= MAX_MESSAGE:
        assert shown == text * repeats


def test_the_ends_of_a_long_text_stay():
    shown = bounded("begins here" + "-" * 70_000 + "ends here")
    assert shown.startswith("begins here") and shown.endswith("ends here") and "[70020 characters]" in shown


def test_an_error_bounds_all_that_it_carries():
    error = InvalidRequest("a\x1b" * 70_000, "b" * 70_000, param="c" * 70_000)
    assert len(str(error)) <= 2 * MAX_MESSAGE + 3 and readable(str(error))
    assert error.param and len(error.param) == MAX_QUOTED
    assert str(error.args[0]) == error.message
