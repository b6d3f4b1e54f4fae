"""What an engine shows of itself agrees with its counters, at every moment, and in every body."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.core import EngineCore
from kvasir.engine.fake import FakeEngine
from kvasir.engine.look import MOST_ANSWERS, MOST_STEPS
from kvasir.engine.subprocess import ProcessEngine
from kvasir.plan import StepPlan
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.snapshot import Snapshot
from kvasir.types import ServiceClass
from tests.examples import examples
from tests.sched.drive import request


def cells(snapshot: Snapshot) -> list[list[int]]:
    return [[c for c, n in zip(g.runs[::2], g.runs[1::2], strict=True) for _ in range(n)] for g in snapshot.groups]


def check(core: EngineCore) -> None:
    """The map counts what the pools count, and each running answer's blocks are on it."""
    snapshot, stats = core.look(), core.stats()
    maps = cells(snapshot)
    assert [len(m) for m in maps] == [g.total for g in snapshot.groups] and sum(map(len, maps)) == stats.blocks_total
    assert sum(cell >= 2 for m in maps for cell in m) == stats.blocks_used
    assert sum(cell == 1 for m in maps for cell in m) == stats.blocks_cached
    running = {s.row: s for s in core.scheduler.running}
    assert {a.row for a in snapshot.answers if a.row >= 0} == running.keys()
    assert {cell // 2 - 3 for m in maps for cell in m if cell >= 6} <= running.keys()
    for answer in snapshot.answers:
        assert 0 <= answer.computed <= answer.known and answer.age >= 0
        assert answer.row < 0 or answer.prompt == running[answer.row].prompt_len


REQUESTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 30), st.integers(1, 2), st.sampled_from([None, 100.0])),
    min_size=1,
    max_size=8,
)


@given(REQUESTS, st.sampled_from([0, 24, (0, 24)]), st.booleans())
@examples(40)
def test_the_map_agrees_with_the_counters_after_every_step(requests, window, overlaps):
    runner = FakeRunner(num_blocks=16, block_size=8, max_rows=3, window=window, overlaps=overlaps, max_model_len=100)
    core = EngineCore(runner, Scheduler(runner.capacity))
    plans: list[StepPlan] = []
    core.plan_listener = plans.append
    for i, (length, tokens, n, ttl) in enumerate(requests):
        prompt = [5] * (length // 2) + [i] * (length - length // 2)
        core.add(replace(request(f"r{i}", prompt, max_tokens=tokens, n=n), cache_ttl=ttl))
    check(core)
    while core.has_work():
        core.step()
        check(core)
    computed = [(p.step, p.num_tokens) for p in plans if p.work][-MOST_STEPS:]
    assert [(s.step, s.prefill_tokens + s.decode_rows) for s in core.look().steps] == computed


def test_a_snapshot_is_bounded():
    runner = FakeRunner(num_blocks=9000, block_size=8, max_rows=2, max_model_len=600)
    core = EngineCore(runner, Scheduler(runner.capacity, max_waiting=2000))
    for i in range(MOST_ANSWERS + 50):
        core.add(request(f"r{i}", [i % 200, 2, 3], max_tokens=2))
    core.step()
    snapshot = core.look()
    assert len(snapshot.answers) == MOST_ANSWERS and [a.row >= 0 for a in snapshot.answers[:3]] == [True, True, False]
    assert snapshot.groups[0].per_cell == 3 and len(cells(snapshot)[0]) == 3000 and snapshot.groups[0].total == 8999


@pytest.fixture(params=["inproc", "process"])
async def engine(request):
    options = {"vocab_size": 256, "max_rows": 4, "max_model_len": 512, "step_seconds": 0.004}
    engine = FakeEngine(**options) if request.param == "inproc" else ProcessEngine(fake=options)
    await engine.start()
    yield engine
    await engine.stop()


async def test_every_body_shows_what_runs(engine):
    empty = await engine.look()
    assert not empty.answers and not empty.steps and cells(empty) == [[0] * 63]
    stream = engine.submit(replace(request("a", [1, 2, 3], max_tokens=300), slo=ServiceClass.BATCH, tenant="t"))
    async for _ in stream:
        break
    shown = await engine.look()
    (answer,) = shown.answers
    assert (answer.id, answer.index, answer.slo, answer.tenant) == ("a", 0, ServiceClass.BATCH, "t")
    assert answer.prompt == 3 < answer.known and shown.stats.running == 1 and shown.steps[0].prefill_tokens == 3
    assert shown.now > empty.now and 3 + answer.row in [cell // 2 for cell in cells(shown)[0]]
    await stream.aclose()
    while (await engine.look()).answers:
        pass
    assert (await engine.stats()).blocks_used == 0
