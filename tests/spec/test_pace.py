"""How many ids are drafted."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.spec.pace import GAIN, Chance, StepTimes, best_length, shares, worth_waiting


def measured(*times: float) -> StepTimes:
    """of steps of 1, 2, 3, ... rows"""
    found = StepTimes()
    for rows, seconds in enumerate(times, 1):
        found.note(rows, seconds)
    return found


def rate(chances, counts, times) -> float:
    tokens = sum(
        1 + sum(chance**place for place in range(1, count + 1)) for chance, count in zip(chances, counts, strict=True)
    )
    return tokens / times.of(len(chances) + sum(counts))


rows = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=3)


@given(rows, st.lists(st.floats(0.1, 10), min_size=12, max_size=12))
def test_no_other_numbers_promise_more(rows, seconds):
    chances, most, times = [chance for chance, _ in rows], [count for _, count in rows], measured(*seconds)
    found = shares(chances, most, times)
    assert all(0 <= count <= limit for count, limit in zip(found, most, strict=True))
    best = max(rate(chances, counts, times) for counts in product(*(range(limit + 1) for limit in most)))
    none = rate(chances, [0] * len(rows), times)
    assert rate(chances, found, times) >= (best if any(found) else best / GAIN) * 0.999999
    assert not any(found) or rate(chances, found, times) > GAIN * none * 0.999999


def test_free_rows_are_all_used_and_dear_ones_not():
    assert shares([0.9, 0.5], [4, 2], measured(*[1.0] * 9)) == [4, 2]
    assert shares([0.9, 0.5], [4, 2], measured(*range(1, 10))) == [0, 0]


def test_a_tile_is_filled():
    """Two rows cost as much as four."""
    assert shares([0.8], [7], measured(1.0, 1.5, 1.5, 1.5, 3.0, 3.0, 3.0, 3.0)) == [3]


def test_a_pass_that_drafts_all_ids_is_worth_more_of_them():
    """Steps of 10 ms, and 3 ms for an id or for a block."""
    times, rounds = measured(*(0.010 for _ in range(9))), measured(*(0.003 for _ in range(9)))
    assert best_length(0.5, 1, 8, times, rounds) == 1
    assert best_length(0.5, 1, 8, times, rounds, blocks=True) == 8
    rows = measured(*(0.003 + 0.002 * more for more in range(9)))  # but longer blocks take longer
    assert 0 < best_length(0.5, 1, 8, times, rows, blocks=True) < 4


def test_a_drafter_that_is_never_right_is_rarely_asked():
    times, chance, drafted = measured(*(1 + 0.05 * rows for rows in range(20))), Chance(), 0
    for _ in range(1000):
        [count] = shares([chance.value], [8], times)
        drafted += count
        chance.settle(count, 0)
    assert 10 < drafted < 60


def test_a_drafter_that_becomes_right_is_found():
    times, chance, accepted = measured(*(1 + 0.05 * rows for rows in range(20))), Chance(), 0
    for step in range(600):
        [count] = shares([chance.value], [8], times)
        right = count if step >= 200 else 0
        chance.settle(count, right)
        accepted += right
    assert accepted > 1000


def test_times_between_measured_ones_are_on_a_line():
    times = StepTimes()
    times.note(2, 1.0)
    times.note(6, 3.0)
    assert [times.of(rows) for rows in (2, 4, 6)] == [1.0, 2.0, 3.0]
    assert times.of(1) < 1.0 and times.of(8) > 3.0
    times.note(2, 2.0)
    assert 1.0 < times.of(2) < 2.0


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10)), max_size=40))
def test_more_rows_never_take_less_time(found):
    times = StepTimes()
    for number, seconds in found:
        times.note(number, seconds)
    known = [times.of(number) for number in range(1, 12)]
    assert all(a <= b * 1.000001 for a, b in pairwise(known))


def test_a_time_of_a_bad_moment_does_not_last():
    """One row is not measured again as long as two seem to be faster."""
    times = StepTimes()
    times.note(1, 5.0)
    for _ in range(20):
        times.note(2, 1.1)
    assert times.of(1) <= times.of(2) < 1.2


def test_all_times_follow_a_machine_that_slows_down():
    times = measured(1.0, 1.1, 1.2)
    for _ in range(40):
        times.note(1, 2.0)
    assert times.of(3) > 1.8


@pytest.mark.parametrize(
    ("chance", "late", "waits"), [(0.9, 1.5, True), (0.9, 5.0, False), (0.2, 1.5, False), (0.2, 1.0, True)]
)
def test_waiting_for_a_draft_must_make_up_for_planning_late(chance, late, waits):
    """late: a step's time if it is planned once the last id is known."""
    times, ahead = measured(*(late for _ in range(9))), measured(1.0)
    assert worth_waiting([chance], [4], 1, times, ahead) == waits
    assert worth_waiting([chance] * 2, [2, 2], 2, times, measured(0.5, 1.0)) == waits


def test_an_interruption_does_not_make_rows_look_free():
    times = measured(1.0, 2.0, 3.0)
    for _ in range(20):
        times.note(1, 1.0)
    times.note(1, 100.0)
    assert times.of(3) == pytest.approx(3 * times.of(1))
