"""The speed of a choice is measured by the engine's clock, however late and in whatever chunks its tokens are read."""

from __future__ import annotations

import time

import pytest

from kvasir.engine.answer import TextDelta
from kvasir.engine.meter import Meter
from kvasir.engine.pace import Pace
from kvasir.types import FinishReason, Request, SamplingParams, ServiceClass, Target, Usage

MOMENTS = (0.01, 0.02, 0.04)  # seconds after the request


def deltas(begun: float, moments=MOMENTS, tokens: int = 1) -> list[TextDelta]:
    ends = [None] * (len(moments) - 1) + [FinishReason.LENGTH]
    return [
        TextDelta(0, "a", token_ids=(97,) * tokens, usage=Usage(1, tokens * count), at=begun + at, finish_reason=end)
        for count, (at, end) in enumerate(zip(moments, ends, strict=True), 1)
    ]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_pace_leaves_out_what_came_with_the_first_token(tokens):
    pace = Pace()
    time.sleep(0.05)
    for delta in deltas(pace.begun, tokens=tokens):
        pace.saw(delta)
    assert pace.first is not None and pace.first - pace.begun == pytest.approx(0.01)
    assert pace.rate == pytest.approx(2 * tokens / 0.03) and pace.per_token == pytest.approx(0.03 / (2 * tokens))


def test_an_answer_of_one_step_has_no_pace():
    pace = Pace()
    time.sleep(0.02)
    for delta in deltas(pace.begun, moments=(0.01,), tokens=8):
        pace.saw(delta)
    assert pace.count == 8 and pace.rate is None and pace.per_token is None


def test_the_meter_measures_answers_by_the_engine():
    """All that came is read in one go, late: by its arrival, it would have been in time."""
    meter, request = Meter(), Request("r", (1,), SamplingParams(max_tokens=3, seed=0))
    before = time.monotonic()
    with meter.watch(request, Target(60.0, 0.01)) as watch:
        begun = time.monotonic()
        time.sleep(0.05)
        for delta in deltas(begun):
            watch.saw(delta)
    [first], [pace] = meter.recent_first, meter.recent_paces
    assert 0.01 <= first <= begun - before + 0.01 and pace == pytest.approx(0.015)
    found = meter.classes[ServiceClass.INTERACTIVE]
    assert (found.in_time, found.late) == (0, 1)
    assert found.first_token.sum == first and found.per_token.sum == pytest.approx(0.03)
