"""Stop strings: the first that is complete ends the text, however the text was cut."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest
from kvasir.text.stop import StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)
TEXT = st.text("abc", max_size=14)


def reference(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The rule, one character after the other: the longest stop string that is complete with it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


def run(text: str, cuts: list[int], stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    stream = StopStrings(stops, include_stop)
    shown, matched = "", None
    places = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    for start, end in pairwise(places):
        piece, matched = stream.push(text[start:end])
        shown += piece
    return shown + stream.flush(), matched


@given(TEXT, STOPS, st.booleans())
@example("cabcb", ["b", "ab", "cb"], False)
def test_all_ways_to_cut_a_text_give_the_same(text, stops, include_stop):
    expected = reference(text, stops, include_stop)
    for pattern in range(1 << min(max(len(text) - 1, 0), 9)):
        cuts = [i + 1 for i in range(len(text)) if pattern >> i & 1]
        assert run(text, cuts, stops, include_stop) == expected


@given(TEXT, STOPS)
def test_only_the_longest_possible_beginning_is_held_back(text, stops):
    stream = StopStrings(stops)
    shown, matched = stream.push(text)
    if matched is None:
        held = text[len(shown) :]
        begins = [k for k in range(1, len(text) + 1) if any(s.startswith(text[-k:]) and s != text[-k:] for s in stops)]
        assert len(held) == max(begins, default=0)


def test_the_stop_string_may_be_kept():
    assert StopStrings(["END"], include_stop=True).push("textENDmore") == ("textEND", "END")


def test_text_after_the_end_is_dropped():
    stream = StopStrings(["x"])
    assert stream.push("ax") == ("a", "x")
    assert stream.push("more") == ("", "x") and stream.flush() == "" and stream.stopped == "x"


def test_held_back_text_is_released_at_the_end():
    stream = StopStrings(["</tool>"])
    assert stream.push("a </to") == ("a ", None)
    assert stream.flush() == "</to"


def test_no_stop_strings_hold_nothing_back():
    assert StopStrings([]).push("abc") == ("abc", None)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequest, match="empty") as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"
