"""The order of service that is kept from step to step is the one that the policy makes of everybody anew."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from weakref import WeakKeyDictionary

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.runner.fake import FakeRunner
from kvasir.sched import slo
from kvasir.sched.scheduler import Scheduler
from kvasir.sched.sequence import Sequence, Status
from kvasir.sched.service import Service
from kvasir.types import Request, SamplingParams, ServiceClass
from tests.examples import examples
from tests.sched.drive import Drive
from tests.sched.test_together import run


def anew(service: Service, candidates: list, held: Sequence | None, now: float) -> list:
    """The whole order, from the pure policy. held: the sequence promoted last."""
    facts = [service.facts(seq, now) for seq in candidates]
    chosen = slo.promote(facts, held is not None and held.promoted and held.status is not Status.FINISHED)
    if chosen is not None:
        facts[chosen] = facts[chosen]._replace(promoted=True)
    return [candidates[i] for i in slo.service_order(facts, service.shares)]


@pytest.fixture
def compared(monkeypatch):
    """Every order that is asked for, beside the one made anew. How many, and the longest."""
    counts: Counter[str] = Counter()
    order, promoted = Service.order, WeakKeyDictionary[Service, Sequence]()

    def both(self, running, table, now):
        expected = anew(self, [*running, *(table.waiting if table else ())], promoted.get(self), now)
        found = list(order(self, running, table, now))
        promoted.update((self, seq) for seq in found if seq.promoted)
        assert [(s.request.id, s.index) for s in found] == [(s.request.id, s.index) for s in expected]
        counts["orders"] += 1
        counts["longest"] = max(counts["longest"], len(found))
        return found

    monkeypatch.setattr(Service, "order", both)
    return counts


def test_the_order_is_the_policys_whatever_happens(compared):
    @examples(20)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        run(random.Random(seed))

    check()
    assert compared["orders"] > 100


def crowd(chance: random.Random, count: int, tenants: str = "abc") -> list[Request]:
    texts = [tuple(chance.randrange(256) for _ in range(40)) for _ in range(5)]
    return [
        Request(
            f"r{i}",
            chance.choice(texts)[: chance.randrange(40)] + tuple(chance.randrange(256) for _ in range(3)),
            SamplingParams(temperature=0.0, max_tokens=chance.choice([2, 20, 60]), seed=0, ignore_eos=True),
            slo=chance.choice(list(ServiceClass)),
            tenant=chance.choice(tenants),
            priority=chance.choice([0, 0, 1]),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_order_of_many_requests_whose_targets_pass(compared, ahead):
    """Steps take longer and longer, so that the costs leave their band, and all targets are missed one by one."""
    chance, now = random.Random(3), [0.0]
    runner = FakeRunner(num_blocks=30, max_rows=6, max_tokens_per_step=24, max_model_len=200)
    scheduler = Scheduler(runner.capacity, clock=lambda: now[0], max_waiting=1000)
    drive = Drive(scheduler, runner, ahead)
    later = crowd(chance, 120)
    while later or scheduler.has_work():
        for request in later[: chance.choice([0, 0, 9])]:
            scheduler.add(request)
            later = later[1:]
        before = len(drive.plans)
        drive.step()
        for plan in drive.plans[before:]:
            seconds = (0.02 + 0.01 * plan.num_tokens) * (1 + now[0] / 20) * chance.uniform(0.9, 1.1)
            now[0] += seconds
            scheduler.service.observe(plan, seconds)
        scheduler.check()
    assert compared["longest"] > 60


def test_a_step_ranks_only_changed_requests(monkeypatch):
    """With a thousand requests that wait for blocks, it costs no more than with ten."""

    calls, facts = Counter[str](), Service.facts

    def counted(service, seq, now):
        calls["facts"] += 1
        return facts(service, seq, now)

    monkeypatch.setattr(Service, "facts", counted)

    def looks(waiting: int) -> float:
        runner = FakeRunner(num_blocks=60, max_rows=16, max_tokens_per_step=64, max_model_len=900)
        ticks = itertools.count()  # also on a slow machine, no request waits so long that the order changes
        scheduler = Scheduler(runner.capacity, max_waiting=2000, clock=lambda: next(ticks) * 1e-6)
        drive = Drive(scheduler, runner)
        for i in range(waiting + 2):
            prompt = tuple((i * 7 + k * 31) % 256 for k in range(200 + i % 7))
            params = SamplingParams(temperature=0.0, max_tokens=400, seed=0, ignore_eos=True)
            scheduler.add(Request(f"r{i}", prompt, params, tenant="ab"[i % 2]))
        for _ in range(60):
            drive.step()
        calls.clear()
        for _ in range(50):
            drive.step()
        assert len(scheduler.waiting) >= waiting - 4
        return calls["facts"]

    assert looks(1000) <= looks(10) + 50
