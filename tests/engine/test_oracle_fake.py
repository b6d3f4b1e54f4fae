"""The oracle itself, on the FakeRunner: it passes on a sound engine and fails on a broken one."""

from collections import defaultdict

import pytest

from kvasir.engine.core import EngineCore
from kvasir.runner.executor import Taken
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.types import FinishReason, Request, SamplingParams
from tests.oracle import mixed_requests, plain, same, together


def make(**options) -> EngineCore:
    fake = FakeRunner(vocab_size=256, max_model_len=300, **options)
    return EngineCore(fake, Scheduler(fake.capacity, eos_ids=(5,)))


@pytest.mark.parametrize("overlaps", [False, True])
def test_all_features_together_equal_each_request_alone(overlaps):
    requests = mixed_requests(256, 300)
    expected = plain(make(num_blocks=400), requests)
    core = make(num_blocks=24, max_rows=5, max_tokens_per_step=17, overlaps=overlaps)
    got = together(core, requests, preempt=0.1, cancel=("r3",))
    same(expected, got, leave_out=("r3",))
    assert core.stats().preemptions > 5


@pytest.mark.parametrize("overlaps", [False, True])
def test_failed_steps_change_no_answer(overlaps):
    """Every eleventh step raises, and one sequence in four has a row that fails: those end, the others are whole."""
    requests = mixed_requests(256, 300)
    expected = plain(make(num_blocks=400), requests)
    doomed = {r.id: list(r.prompt_ids) for r in requests[::4]}

    def raises(plan):
        if plan.step % 11 == 10 and len(plan.works) > 1:
            raise RuntimeError("a step in eleven")

    core = make(num_blocks=40, max_rows=6, max_tokens_per_step=29, overlaps=overlaps, fault=raises)
    draw = core.runner.executor.draw

    def fails(work, mask):
        row = core.runner.rows[work.row]
        if work.start > 20 and row.ids[: row.prompt_len].tolist() in doomed.values():
            return Taken(error="this row")
        return draw(work, mask)

    core.runner.executor.draw, core.runner.executor.draws_columns = fails, False
    reasons, tokens, todo = {}, defaultdict(list), list(requests)
    while todo or core.has_work():
        if todo:
            core.add(todo.pop())
        for delta in core.step():
            assert (delta.id, delta.index) not in reasons, "a delta behind the last one"
            tokens[delta.id, delta.index] += delta.token_ids
            if delta.finish_reason:
                reasons[delta.id, delta.index] = delta.finish_reason
        core.check()
    failed = {key for key, reason in reasons.items() if reason is FinishReason.ERROR}
    assert failed and {key[0] for key in failed} <= set(doomed)
    assert set(reasons) == set(expected)
    for key, answer in expected.items():
        end = len(tokens[key])
        assert tokens[key] == answer.tokens[:end] and (key in failed or end == len(answer.tokens))


def test_the_next_step_is_planned_while_one_runs():
    core = make(overlaps=True)
    at = []
    plan, sample = core.scheduler.plan, core.runner.sample
    core.scheduler.plan = lambda: at.append("plan") or plan()
    core.runner.sample = lambda *args: at.append("wait") or sample(*args)
    core.add(mixed_requests(256, 300)[0])
    for _ in range(3):
        core.step()
    assert at == ["plan", "plan", "wait", "plan", "wait"]


def test_a_broken_engine_is_noticed():
    requests = mixed_requests(256, 300)
    expected = plain(make(num_blocks=400), requests)
    core = make(num_blocks=400, max_rows=5)
    draw = core.runner.executor.draw

    def broken(work, mask):
        taken = draw(work, mask)
        if work.start > 40 and len(core.scheduler.running) > 3:
            return taken._replace(tokens=((taken.tokens[0] + 1) % 256,))
        return taken

    core.runner.executor.draw, core.runner.executor.draws_columns = broken, False
    with pytest.raises(AssertionError, match="differ"):
        same(expected, together(core, requests))


@pytest.mark.parametrize("broken", ["execute", "sample"])
def test_a_runner_that_is_broken_fails_every_request(broken, monkeypatch):
    """Also steps that compute nothing fail then; those planned after them must not be taken back for ever."""
    runner = FakeRunner(max_rows=8, overlaps=True)

    def fail(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(runner, broken, fail)
    core = EngineCore(runner, Scheduler(runner.capacity))
    for i in range(20):
        core.add(Request(f"{i}", (1, 2, 3) * 10, SamplingParams(max_tokens=9, seed=0)))
    reasons = []
    for _ in range(100):
        reasons += [delta.finish_reason for delta in core.step() if delta.finish_reason]
    assert reasons == [FinishReason.ERROR] * 20 and not core.has_work()
