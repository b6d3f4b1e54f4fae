"""What weights get of the memory: whether they are streamed, and how several processes share it."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.errors import ConfigError
from kvasir.runner.allotment import Needs, allot, at_least, budget_of

MIB = 1 << 20


def test_what_fits_is_not_streamed():
    assert budget_of(100, 100, None) == budget_of(100, 200, 100) == 0
    assert budget_of(100, 90, None) == 45
    assert budget_of(100, 1000, 60) == 60


def test_more_memory_than_there_is_is_refused():
    with pytest.raises(ConfigError, match=r"weights_memory is 2.0 MiB, and 1.0 MiB of memory are free"):
        budget_of(4 * MIB, MIB, 2 * MIB)


@pytest.mark.parametrize(
    ("size", "words"), [(1, "1 KiB"), (1025, "2 KiB"), (10 * MIB, "10.0 MiB"), (10 * MIB + 1, "10.1 MiB")]
)
def test_what_is_needed_is_named_so_that_it_suffices(size, words):
    assert at_least(size) == words


def test_processes_stream_if_they_do_not_fit_together():
    half = Needs(10, (20, 20))
    assert allot([half, half], 100, None) == [0, 0]
    assert allot([half, half], 99, 80) == [40, 40]
    assert allot([half], 99, None) == [0]


def test_processes_share_what_is_left_by_what_they_could_stream():
    large, small = Needs(50, (10,) * 9), Needs(10, (10,) * 5)
    assert allot([large, small], 1000, 150) == [60 + 80 * 70 // 120, 20 + 40 * 70 // 120]
    assert allot([large, Needs(10, ())], 1000, 149) == [139, 10]  # nothing of it can be streamed


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_process_gets_too_little_and_none_more_than_it_needs(count):
    rng = np.random.default_rng(count)
    for _ in range(200):
        needs = [
            Needs(int(rng.integers(50)), (*rng.integers(1, 30, rng.integers(1, 9)).tolist(),)) for _ in range(count)
        ]
        wish = int(rng.integers(1, 300 * count))
        if wish < sum(one.least for one in needs):
            with pytest.raises(ConfigError, match="too few"):
                allot(needs, 10_000, wish)
            continue
        budgets = allot(needs, 10_000, wish)
        if not any(budgets):
            assert sum(one.all for one in needs) <= wish
            continue
        assert wish - count < sum(budgets) <= wish
        assert all(one.least <= budget <= one.all for one, budget in zip(needs, budgets, strict=True))
