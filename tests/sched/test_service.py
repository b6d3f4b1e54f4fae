"""Who is served when: classes, tenants, deadlines, and the pace of answers, on whole plans and a clock of our own."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvasir.engine.core import EngineCore
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.sched.sequence import Status
from kvasir.sched.service import Service, load_of
from kvasir.types import FinishReason, Request, SamplingParams, ServiceClass, Target

INTERACTIVE, BATCH, BACKGROUND = ServiceClass
TARGETS = {INTERACTIVE: Target(1.0, 0.05), BATCH: Target(20.0, 0.5), BACKGROUND: Target(300.0, 5.0)}


def request(id: str, length: int, max_tokens: int = 4, slo: ServiceClass = INTERACTIVE, **fields) -> Request:
    seed = sum(id.encode())
    prompt = tuple((seed * 31 + i * 7) % 256 for i in range(length))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    return Request(id, prompt, params, slo=slo, **fields)


class World:
    """A core over the fake runner; a step takes seconds that are linear in what it does."""

    def __init__(self, token: float = 0.001, row: float = 0.002, step: float = 0.01, targets=TARGETS, **options):
        self.now = 0.0
        options = {"num_blocks": 600, "max_tokens_per_step": 256, "max_model_len": 2000, **options}
        fake = FakeRunner(**options)
        self.scheduler = Scheduler(fake.capacity, targets=targets, clock=lambda: self.now)
        self.core = EngineCore(fake, self.scheduler)
        self.scheduler.service.observe, self._observe = lambda plan, seconds: None, self.scheduler.service.observe
        self._plans: list = []
        self.core.plan_listener = self._plans.append
        self.costs = token, row, step
        self.times: dict[str, list[float]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def add(self, *requests: Request) -> None:
        for r in requests:
            self.core.add(r)

    def step(self) -> None:
        self._plans.clear()
        plan_time = self.now
        deltas = self.core.step()
        for plan in self._plans:
            load, (token, row, step) = load_of(plan), self.costs
            seconds = load.prefill_tokens * token + load.decode_rows * row + step
            self.now = plan_time + seconds
            self._observe(plan, seconds)
        for d in deltas:
            self.times.setdefault(d.id, []).extend([self.now] * len(d.token_ids))
            if d.finish_reason:
                self.reasons[d.id] = d.finish_reason
        self.core.check()

    def run(self, seconds: float = 1e9) -> None:
        end = self.now + seconds
        while self.core.has_work() and self.now < end:
            self.step()


def test_classes_go_first_in_their_order():
    world = World(max_rows=1)
    world.add(request("c", 50, slo=BACKGROUND), request("b", 50, slo=BATCH), request("a", 50))
    world.run()
    assert world.times["a"][-1] < world.times["b"][0] < world.times["b"][-1] < world.times["c"][0]


class Fake(SimpleNamespace):
    __hash__ = object.__hash__  # as that of a Sequence


def waiting_since(since: float, service_class: ServiceClass, status: Status) -> Any:
    """What Service reads of a sequence whose prompt has three tokens."""
    return Fake(
        order=0, status=status, promoted=False, expected=0, prompt_len=3,
        request=Fake(slo=service_class, tenant="", priority=0), counts=Fake(known=3, computed=0, since=since),
        content=Fake(prefix_key=None), embeds=False,
    )  # fmt: skip


@given(
    st.lists(st.sampled_from(ServiceClass), min_size=1),
    st.lists(st.sampled_from(ServiceClass), min_size=1),
    st.none() | st.tuples(st.booleans(), st.integers(0, 9)),
)
@example([BATCH], [BACKGROUND], (True, 0))
def test_higher_classes_are_known_from_counts(waiting, running, promoted):
    sequences = [
        [waiting_since(0.0, c, status) for c in classes]
        for classes, status in ((waiting, Status.WAITING), (running, Status.RUNNING))
    ]
    service = Service(TARGETS, 256, 16, 256)
    if promoted:
        group = sequences[promoted[0]]
        (first,) = service.order([group[promoted[1] % len(group)]], None, now=1e9)
        assert first.promoted
    first, last = ([(not s.promoted, s.request.slo.rank) for s in group] for group in sequences)
    assert service.stands_higher(Counter(waiting), Counter(running)) == (min(first) < max(last))


def test_a_higher_class_takes_the_row_of_a_lower_one_and_the_answer_stays():
    alone = World(max_rows=1)
    alone.add(request("slow", 40, max_tokens=60, slo=BACKGROUND))
    alone.run()
    world = World(max_rows=1)
    world.add(request("slow", 40, max_tokens=60, slo=BACKGROUND))
    for _ in range(10):
        world.step()
    world.add(request("quick", 40))
    world.run()
    assert world.scheduler.preemptions == 1 and world.times["quick"][-1] < world.times["slow"][-1]
    assert len(world.times["slow"]) == 60
    classes = world.core.stats().classes
    assert [classes[c].displaced for c in ServiceClass] == [0, 0, 1]


def test_the_waiting_time_of_each_class_is_counted_once():
    """Of an answer that got a row: also when it leaves it and comes back."""
    world = World(max_rows=1)
    world.add(request("slow", 40, max_tokens=60, slo=BACKGROUND))
    world.step()
    waiting = [request(f"a{i}", 40) for i in range(2)] + [request("b", 40, slo=BATCH)]
    world.add(*waiting)
    stats = world.core.stats()
    assert [(stats.classes[c].running, stats.classes[c].waiting) for c in ServiceClass] == [(0, 2), (0, 1), (1, 0)]
    came = world.now
    world.run()
    assert world.scheduler.preemptions == 1
    histograms = [world.core.stats().classes[c].queue_seconds for c in ServiceClass]
    assert [sum(h.counts) for h in histograms] == [2, 1, 1]
    ended = {id: times[-1] for id, times in world.times.items()}
    assert histograms[0].sum == pytest.approx(ended["a0"] - came) and histograms[2].sum == 0
    assert histograms[1].sum == pytest.approx(max(ended["a0"], ended["a1"]) - came)


def test_equals_do_not_take_turns_in_a_row():
    world = World(max_rows=1)
    world.add(request("a", 40, max_tokens=30), request("b", 40, max_tokens=30))
    world.run()
    assert world.scheduler.preemptions == 0


def test_running_answers_keep_their_pace_beside_a_long_prompt():
    world = World()
    world.add(request("talk", 20, max_tokens=150))
    for _ in range(30):
        world.step()
    world.add(request("long", 1800, max_tokens=2))
    world.run()
    gaps = [b - a for a, b in zip(world.times["talk"], world.times["talk"][1:], strict=False)]
    late = [g for g in gaps[30:] if g > 1.1 * TARGETS[INTERACTIVE].tpot]
    assert len(late) <= 2, f"{len(late)} of {len(gaps)} tokens were late, up to {max(gaps):.3f} s"
    assert world.times["long"], "the long prompt came through"


def test_without_decoding_sequences_a_prompt_takes_whole_steps():
    world = World()
    world.add(request("long", 1024, max_tokens=1))
    world.run()
    assert world.core.steps == 4 + 1, "the last one frees the row"


def test_a_short_prompt_passes_a_long_one():
    world = World(max_tokens_per_step=64)
    world.add(request("long", 1500, max_tokens=2))
    world.step()
    world.add(request("short", 30, max_tokens=2))
    world.run()
    assert world.times["short"][0] < world.times["long"][0]


@pytest.mark.parametrize("rows", [1, 2])
def test_tenants_of_a_class_share_it(rows):
    """One floods, another comes now and then: neither waits for the whole of the other's queue."""
    world = World(max_rows=rows)
    world.add(*(request(f"flood{i}", 60, tenant="a") for i in range(20)), request("other", 60, tenant="b"))
    world.run()
    order = sorted(world.times, key=lambda id: world.times[id][0])
    assert order.index("other") < 4


@pytest.mark.parametrize("rows", [1, 4])
def test_deadlines_end_what_runs_and_what_waits(rows):
    world = World(max_rows=rows)
    late = [request(f"late{i}", 30, max_tokens=400, deadline=0.5) for i in range(3)]
    world.add(*late, request("free", 30, max_tokens=5))
    world.run()
    assert {world.reasons[r.id] for r in late} == {FinishReason.TIMEOUT}
    assert world.reasons["free"] is FinishReason.LENGTH and world.now < 2.0
    assert world.scheduler.kv.used == 0


def test_a_deadline_includes_the_time_waited_in_earlier_engines():
    world = World()
    fields = {"max_tokens": 400, "deadline": 0.5, "waited": 0.4, "resume_ids": ((1, 2),)}
    world.add(request("resumed", 30, **fields), request("fresh", 30, max_tokens=400, deadline=0.5))
    while "resumed" not in world.reasons:
        world.step()
    assert 0.1 <= world.now < 0.2 and "fresh" not in world.reasons
    world.run()
    assert world.reasons["fresh"] is world.reasons["resumed"] is FinishReason.TIMEOUT and world.now >= 0.5


def test_the_least_urgent_is_served_in_the_end():
    """Background work under a steady stream of short interactive requests."""
    world = World(max_rows=1, num_blocks=60, targets={**TARGETS, BACKGROUND: Target(3.0, 1.0)})
    world.add(request("patient", 30, slo=BACKGROUND))
    number = 0
    while "patient" not in world.reasons and world.now < 60.0:
        if len(world.scheduler.waiting) < 3:
            world.add(request(f"r{number}", 10, max_tokens=20))
            number += 1
        world.step()
    assert world.reasons.get("patient") is FinishReason.LENGTH, "it starved"
