"""Whether drafters work at all, tried on machines whose times are known."""

from __future__ import annotations

import random

import pytest

from kvasir.spec.trial import BETTER, TRIED, WINDOW, Trial


def spent(trial: Trial, steps: int, gain: float, rows: int = 1, stalls: float = 0.0, seed: int = 0) -> float:
    """Seconds per token if steps without drafters take a second per token and row, and those with drafters make a token
    in 1 / gain. Half of the ids of the latter are accepted ones. stalls: share of steps that take ten times as long."""
    draw, seconds, tokens = random.Random(seed), 0.0, 0
    for _ in range(steps):
        made = 2 * rows if trial.drafts else rows
        taken = made / gain if trial.drafts else made
        interrupted = taken * (10 if draw.random() < stalls else 1)
        accepts = trial.drafts
        trial.note(rows, interrupted)
        if accepts:
            trial.accepted(rows)
        seconds, tokens = seconds + taken, tokens + made
    return seconds / tokens


@pytest.mark.parametrize("gain", [0.3, 0.5, 0.8, 0.95, 1.0, 1.05, 1.5, 3.0])
@pytest.mark.parametrize("rows", [1, 32])
def test_almost_as_fast_as_the_better_way(gain, rows):
    trial = Trial()
    spent(trial, 1000, gain, rows)
    assert spent(trial, 20_000, gain, rows) < 1.03 / max(1.0, gain)


@pytest.mark.parametrize(("gain", "drafts"), [(0.7, False), (1.5, True)])
def test_interrupted_steps_change_nothing(gain, drafts):
    trial, chosen = Trial(), 0
    for seed in range(200):
        spent(trial, 50, gain, stalls=0.02, seed=seed)
        chosen += trial.drafts == drafts
    assert chosen > 165


def test_drafters_that_begin_to_win_or_to_lose_are_noticed():
    trial = Trial()
    spent(trial, 20_000, 0.5)
    spent(trial, BETTER[1] + 4 * TRIED[True], 2.0)
    assert spent(trial, 1000, 2.0) < 0.55
    spent(trial, 20_000, 2.0)
    spent(trial, 2 * WINDOW, 0.5)
    assert spent(trial, 1000, 0.5) < 1.15


def test_what_was_planned_before_a_change_is_not_measured():
    """A step that was planned with drafters is settled after drafters have paused."""
    trial = Trial()
    for _ in range(TRIED[True] + 1):
        assert trial.drafts
        trial.note(1, 1.0)
    assert not trial.drafts
    trial.note(1, 1000.0)
    trial.accepted(1000)
    while not trial.drafts:
        trial.note(1, 1.0)
    assert trial._rates == {True: 1.0, False: 1.0}
