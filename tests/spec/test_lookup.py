"""Prompt lookup, against a search by hand."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.spec import lookup
from kvasir.spec.lookup import continuation


def by_hand(ids: list[int], most: int) -> tuple[list[int], int]:
    """The same, by comparing all places."""
    best, found = 0, 0
    for after in range(len(ids) - 1, lookup.SHORTEST - 1, -1):
        length = 0
        while length < min(after, lookup.LONGEST) and ids[after - 1 - length] == ids[-1 - length]:
            length += 1
        if length >= lookup.SHORTEST and length > best:
            best, found = length, after
    source = ids[found:]
    return [source[i % len(source)] for i in range(most)] if best else [], best


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_the_longest_of_the_most_recent_matches_is_continued(ids, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "CANDIDATES", 10_000)
        drafted, matching = continuation(array("i", ids), most)
    assert (list(drafted), matching) == by_hand(ids, most)


@given(st.lists(st.sampled_from([0, 1, 255, 256, 65536, 2**31 - 1]), max_size=40))
def test_bytes_that_are_no_ids_do_not_match(ids):
    drafted, matching = continuation(array("i", ids), 1)
    assert bool(drafted) == bool(by_hand(ids, 1)[0]) and matching <= by_hand(ids, 1)[1]


def test_a_copy_is_drafted_and_a_cycle_goes_on():
    text = list(range(100, 130))
    assert list(continuation(array("i", [*text, 7, *text[:10]]), 5)[0]) == text[10:15]
    assert list(continuation(array("i", [1, 2, 3, 1, 2, 3, 1, 2]), 7)[0]) == [3, 1, 2, 3, 1, 2, 3]


def test_only_the_window_is_searched(monkeypatch):
    ids = array("i", [1, 2, 3, *range(10, 60), 1, 2])
    assert continuation(ids, 1) == (array("i", [3]), 2)
    monkeypatch.setattr(lookup, "WINDOW", 20)
    assert continuation(ids, 1) == (array("i"), 0)
