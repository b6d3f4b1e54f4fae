"""Encoder jobs: what a step makes, what the runner holds, and who waits for what."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.caches import Cross, PagedKV
from kvasir.engine.core import EngineCore
from kvasir.errors import InvalidRequest
from kvasir.inputs import Inputs, Source, Span
from kvasir.plan import Encoders, EncoderWork, StepPlan
from kvasir.runner.fake import FakeExecutor, FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.types import FinishReason, Request, SamplingParams, Task
from tests.examples import examples
from tests.oracle import plain, same, together
from tests.sched.drive import Drive, by_hand

PROMPT = tuple(range(60))


def source(name: int, length: int = 10) -> Source:
    data = bytes([name])
    return Source(sha256(data).digest(), length, data)


def asking(id: str, *spans: tuple[int, int], length: int = 10, prompt=PROMPT, **more) -> Request:
    """spans: (start, name of a source)."""
    sources = tuple({name: source(name, length) for _, name in spans}.values())
    inputs = Inputs(tuple(Span(start, length, source(name).content) for start, name in spans))
    params = SamplingParams(max_tokens=4, seed=0, **more)
    return Request(id, tuple(prompt), params, inputs=inputs, sources=sources)


def make(limits: tuple[int, int, int] = (40, 1, 20), ahead: bool = False, **options) -> Drive:
    runner = FakeRunner(num_blocks=100, block_size=8, encoders=Encoders(*limits), **options)
    return Drive(Scheduler(runner.capacity), runner, ahead)


def run(drive: Drive, *requests: Request) -> list[EncoderWork]:
    """What was made; the answers are the right ones."""
    begin = len(drive.plans)
    for request in requests:
        drive.scheduler.add(request)
    while drive.scheduler.has_work():
        drive.step()
        drive.scheduler.check()
    drive.drain()
    for request in requests:
        assert drive.tokens[request.id, 0] == by_hand(request, 256, 512)[0]
    return [job for plan in drive.plans[begin:] for job in plan.encodes]


def names(jobs: list[EncoderWork]) -> list[int]:
    return [job.data[0] for job in jobs]


def test_a_content_is_made_once_for_all_that_read_it():
    drive = make()
    assert names(run(drive, asking("a", (5, 1)), asking("b", (5, 1)), asking("c", (9, 1), (30, 1)))) == [1]
    assert names(run(drive, asking("d", (20, 1), (33, 2)))) == [2], "the first is held still"
    assert names(run(drive, asking("e", (20, 1), (33, 2)))) == [], "a hit of the prefix cache reads nothing"


def test_a_step_encodes_within_its_budget_and_computes_spans_with_embeddings():
    drive = make((100, 1, 20))
    assert names(run(drive, asking("a", (5, 1), (15, 2), (30, 3), (45, 4)))) == [1, 2, 3, 4]
    made = [(len(p.encodes), p.num_tokens) for p in drive.plans if p.work][:2]
    assert made == [(2, 30), (2, 30)], "two of ten embeddings each; tokens up to the third wait"


def test_outputs_are_let_go_for_others_the_one_used_longest_ago_first():
    drive = make((20, 1, 20))
    run(drive, asking("a", (5, 1)), asking("b", (5, 2)))
    run(drive, asking("c", (7, 1)))
    assert names(run(drive, asking("d", (5, 3)))) == [3]
    assert names(run(drive, asking("e", (9, 1)))) == [], "it was used after the second"
    assert names(run(drive, asking("f", (9, 2)))) == [2]
    assert sum(len(plan.dropped) for plan in drive.plans) == 2


def test_a_sequence_without_room_waits_until_others_have_read():
    """Each needs all the room there is: they are computed one after the other, and none waits for ever."""
    drive = make((20, 1, 10), max_tokens_per_step=12)
    requests = [asking(f"r{i}", (3, 2 * i), (40, 2 * i + 1)) for i in range(4)]
    assert sorted(names(run(drive, *requests))) == list(range(8))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_preempted_sequence_gives_its_room_back_and_has_it_made_again(ahead):
    drive = make((20, 1, 10), ahead=ahead, max_tokens_per_step=8)
    drive.scheduler.add(asking("a", (3, 1), (40, 2)))
    for _ in range(3):
        drive.step()
    if not ahead:
        drive.scheduler.preempt(drive.scheduler.running[0])
        drive.scheduler.outputs.check([])
    assert sorted(names(run(drive, asking("b", (3, 3), (40, 4)))))[-2:] == [3, 4]
    assert drive.tokens["a", 0] == by_hand(asking("a", (3, 1), (40, 2)), 256, 512)[0]


def test_a_failed_step_is_not_thought_to_have_made_anything():
    failed: list[StepPlan] = []

    def fault(plan: StepPlan) -> None:
        if plan.encodes and len(plan.work) > 1:
            failed.append(plan)
            raise RuntimeError("no")

    fake = FakeRunner(num_blocks=100, block_size=8, encoders=Encoders(40, 1, 20), fault=fault, overlaps=True)
    core = EngineCore(fake, Scheduler(fake.capacity))
    requests = [asking("a", (5, 1)), asking("b", (5, 2))]
    for request in requests:
        core.add(request)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while core.has_work():
        for delta in core.step():
            assert delta.error is None
            tokens[delta.id] += delta.token_ids
        core.check()
    assert failed and [tokens[r.id] for r in requests] == [by_hand(r, 256, 512)[0] for r in requests]


@examples(15)
@given(st.integers(0, 2**32), st.booleans())
def test_together_equals_alone(seed, overlaps):
    """Random pieces of few contents, in little room, with preemptions, cancels and cross-attention."""
    draw = random.Random(seed)

    def core(limits: Encoders, **options) -> EngineCore:
        kinds = (PagedKV(), Cross(length=6))
        fake = FakeRunner(kinds=kinds, block_size=8, overlaps=overlaps, encoders=limits, **options)
        return EngineCore(fake, Scheduler(fake.capacity))

    requests = []
    for i in range(9):
        starts = [start for start in (2, 11, 25, 40) if draw.random() < 0.5]
        request = asking(f"r{i}", *((start, draw.randrange(4)) for start in starts), length=draw.choice([3, 9]))
        if draw.random() < 0.2:
            extra = source(draw.randrange(4), max((s.length for s in request.sources), default=9))
            sources = {s.content: s for s in (*request.sources, extra)}
            inputs = replace(request.inputs, encoded=extra.content)
            request = replace(request, inputs=inputs, sources=tuple(sources.values()))
        requests.append(request)
    expected = plain(core(Encoders(1000, 1, 1000), num_blocks=200), requests)
    crowded = core(Encoders(45, 1, 9), num_blocks=24, max_rows=4, max_tokens_per_step=draw.choice([7, 30]))
    same(expected, together(crowded, requests, seed=seed, preempt=0.1, cancel=("r1",)), leave_out=("r1",))
    crowded.scheduler.outputs.check([])


def test_impossible_encoder_jobs_are_refused():
    drive, one = make((40, 1, 20)), asking("a", (5, 1))
    other = replace(one, sources=(replace(one.sources[0], data=b"another"),))
    twice = replace(one, sources=one.sources * 2)
    short = replace(one, sources=(source(1, 4),))
    for request, named in (
        (other, "hash"),
        (twice, "given twice"),
        (short, "source.* 4"),
        (replace(one, sources=()), "source.* 0"),
        (asking("a", (5, 1), length=30), "20 of one"),
        (asking("a", *((10 * i, i) for i in range(5))), "40 in all"),
        (replace(one, inputs=Inputs(encoded=source(9).content)), "no source"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            drive.scheduler.add(request)
    without = FakeRunner(encoders=None)
    with pytest.raises(InvalidRequest, match="no encoder"):
        Scheduler(without.capacity).add(one)


class ExecutorWithoutEncoder(FakeExecutor):
    computes = FakeExecutor.computes - {"encodes"}


class RunnerWithoutEncoder(FakeRunner):
    samples = ExecutorWithoutEncoder


def test_an_executor_without_encoders_refuses_jobs_by_name():
    """It costs only the sequence that wanted them."""
    fake = RunnerWithoutEncoder(num_blocks=100, block_size=8)
    core = EngineCore(fake, Scheduler(fake.capacity))
    core.add(asking("bad", (5, 1)))
    core.add(good := Request("good", PROMPT, SamplingParams(max_tokens=4, seed=0)))
    tokens, ends = [], {}
    while core.has_work():
        for delta in core.step():
            tokens += delta.token_ids
            if delta.finish_reason:
                ends[delta.id] = delta
    assert ends["bad"].finish_reason is FinishReason.ERROR and "StepPlan.encodes" in ends["bad"].error
    assert tokens == by_hand(good, 256, 512)[0]


def test_a_missing_encoder_output_is_detected(monkeypatch):
    drive = make()
    monkeypatch.setattr(drive.scheduler.outputs, "make", lambda *_: [])
    with pytest.raises(AssertionError, match="encoded"):
        run(drive, asking("a", (5, 1)))


def test_an_indivisible_prompt_waits_until_all_it_reads_can_be_made():
    runner = FakeRunner(num_blocks=100, block_size=8, encoders=Encoders(100, 1, 25), max_tokens_per_step=200)
    drive = Drive(Scheduler(runner.capacity, bidirectional=True), runner)
    requests = [replace(asking(f"r{i}", (5, 2 * i), (20, 2 * i + 1)), task=Task.EMBED) for i in range(3)]
    for request in requests:
        drive.scheduler.add(request)
    drive.drain()
    assert [len(plan.encodes) for plan in drive.plans if plan.work] == [2, 2, 2]
    assert set(drive.reasons.values()) == {FinishReason.STOP}
    with pytest.raises(InvalidRequest, match="25 in all"):
        drive.scheduler.add(replace(asking("a", (5, 1), (20, 2), (40, 3)), task=Task.EMBED))
