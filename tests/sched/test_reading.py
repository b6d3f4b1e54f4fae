"""Log-probabilities of prompts are computed a few positions per step, so they do not delay other requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.runner.fake import FakeRunner, fake_logprob
from kvasir.sched.budget import BESIDE, LEAST_READ, MOST_READ, READING, StepLoad, StepTime, predict, read_budget
from kvasir.sched.scheduler import Scheduler
from kvasir.types import Delta, ServiceClass
from tests.sched.drive import Drive, request

COSTS = (1e-4, 1e-3, 0.0, 8e-3)  # of StepTime
PROMPT = [1 + i % 90 for i in range(900)]


def make(ahead: bool = False) -> Drive:
    runner = FakeRunner(max_rows=8, max_tokens_per_step=512, max_model_len=1024, num_blocks=512)
    drive = Drive(Scheduler(runner.capacity), runner, ahead)
    drive.scheduler.service.step_time = StepTime(COSTS)
    return drive


def reading(id: str, **params):
    return request(id, PROMPT, prompt_logprobs=0, max_tokens=1, **params)


def reads_of(drive: Drive) -> list[int]:
    return [sum(w.read[1] - w.read[0] for w in plan.work) for plan in drive.plans]


def drain(drive: Drive, steps: int = 3000) -> list[Delta]:
    deltas: list[Delta] = []
    while drive.scheduler.has_work():
        deltas += drive.step()
        assert len(drive.plans) < steps
    return deltas


@pytest.mark.parametrize("ahead", [False, True])
def test_a_long_prompt_is_read_in_pieces_beside_an_answer(ahead):
    drive = make(ahead)
    drive.scheduler.add(request("answer", [1, 2], max_tokens=900))
    for _ in range(5):
        drive.step()
    drive.scheduler.add(reading("long"))
    begun = len(drive.plans)
    most = read_budget(StepTime(COSTS), 1, 1000)
    reported = next(d for d in drain(drive) if d.id == "long" and d.prompt_logprobs)
    reads = reads_of(drive)[begun:]
    assert max(reads) == most < 10, "one step reads no more than it can afford"
    assert sum(reads) == len(PROMPT) - 1
    expected = [fake_logprob(token, place, 0) for place, token in enumerate(PROMPT)][1:]
    assert [(t.token, t.logprob) for t in reported.prompt_logprobs[1:]] == [(e[0], e[1]) for e in expected]


def test_a_lone_reading_is_bounded_as_well():
    drive = make()
    drive.scheduler.add(reading("long"))
    drain(drive)
    assert max(reads_of(drive)) == MOST_READ


def test_requests_after_a_reading_need_not_wait():
    """Several read, more than a step can afford, and one that reads nothing comes last."""
    drive = make()
    drive.scheduler.add(request("answer", [1, 2], max_tokens=900))
    for _ in range(5):
        drive.step()
    for i in range(2):
        drive.scheduler.add(reading(f"long{i}"))
    drive.scheduler.add(replace(request("short", [3, 4, 5], max_tokens=1), slo=ServiceClass.BATCH))
    for _ in range(3):
        drive.step()
    assert drive.tokens["short", 0], "it joins beside what is read"
    drain(drive)
    together = read_budget(StepTime(COSTS), 1, 1000)
    assert max(reads_of(drive)) == together, "they share what one step can afford"
    assert all(drive.tokens[f"long{i}", 0] for i in range(2))


@given(st.integers(0, 64), st.integers(0, 10**6), st.tuples(*[st.floats(0, 1)] * 4))
def test_the_read_allowance_keeps_the_pace_by_the_model(rows, context, costs):
    model = replace(StepTime(), costs=costs)
    found = read_budget(model, rows, context)
    assert LEAST_READ <= found <= (BESIDE if rows else MOST_READ)
    if found > LEAST_READ and rows:
        alone = predict(model, StepLoad(rows, 0, context))
        assert predict(model, StepLoad(rows + found, 0, context)) <= READING * alone * (1 + 1e-9)
