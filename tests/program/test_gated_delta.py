"""Recurrent layers in a program: a token is computed from the row's own state where possible, else from the start of
its block, with the same bits."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from kvasir.caches import State
from kvasir.ops import native
from kvasir.program.program import Program
from tests.program.made import Driver, loaded, program_of

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")
IDS = [(7 * i * i + 3 * i) % 90 for i in range(80)]
PREFIX = 43  # within the third block of 16


@pytest.fixture(scope="module", params=["qwen3-next", "granite-hybrid", "rwkv7"])
def model(request, tmp_path_factory):
    return loaded(request.param, tmp_path_factory.mktemp("model"))


def driver_of(model, **options) -> Driver:
    return Driver(program_of(model, fill=float("nan"), **options), IDS)


def states_of(program: Program) -> list[np.ndarray]:
    """The states at the starts of all blocks, as views of the cache: [layers, copies, blocks, numbers]."""
    (group,) = (i for i, group in enumerate(program.cache.groups) if group.kind.keeps_starts)
    found = []
    for bank, (array,) in program.cache.of_group(group):
        assert isinstance(bank.kind, State)
        found.append(array[..., : prod(bank.kind.state)])
    return found


@pytest.fixture(scope="module")
def expected(model):
    """The hidden rows of all tokens, computed in one step."""
    return driver_of(model).hidden(0, len(IDS)).copy()


def test_a_row_continues_from_its_own_state(model, expected):
    """Without the state at the start of its block, until the next block begins."""
    driver = driver_of(model)
    driver.hidden(0, PREFIX)
    for states in states_of(driver.program):
        states[...] = np.nan
    for at in range(PREFIX, len(IDS)):
        assert np.array_equal(driver.hidden(at, 1)[0], expected[at]), at
    assert driver.program.states[0].reached == len(IDS)


@pytest.mark.parametrize("start", [1, 31, 32, 33, PREFIX])
def test_without_it_the_block_is_walked_again(model, expected, start):
    """As by a row that shares the blocks, or that was preempted."""
    driver = driver_of(model)
    driver.hidden(0, start)
    driver.program.states[0].reached = 0
    assert np.array_equal(driver.hidden(start, 5), expected[start : start + 5])


def test_it_does_need_the_state_of_the_block_then(model, expected):
    driver = driver_of(model)
    driver.hidden(0, PREFIX)
    driver.program.states[0].reached = 0
    for states in states_of(driver.program):
        states[...] = np.nan
    assert not np.array_equal(driver.hidden(PREFIX, 1)[0], expected[PREFIX])


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_rejected_drafts_leave_no_trace(model, expected, kept):
    """Wrong ids over the border of a block; then the right ones."""
    driver = driver_of(model)
    driver.hidden(0, PREFIX + 1)
    right = driver.ids[PREFIX + 1 + kept : PREFIX + 9].copy()
    driver.ids[PREFIX + 1 + kept : PREFIX + 9] = (right + 1) % 90
    driver.hidden(PREFIX + 1, 8)
    driver.ids[PREFIX + 1 + kept : PREFIX + 9] = right
    at = PREFIX + 1 + kept
    assert np.array_equal(driver.hidden(at, 12), expected[at : at + 12])
