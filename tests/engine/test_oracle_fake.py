"""The oracle itself, on the FakeRunner: it passes on a sound engine and fails on a broken one."""

import pytest

from kvasir.engine.core import EngineCore
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from tests.oracle import mixed_requests, plain, same, together


def make(**options) -> EngineCore:
    fake = FakeRunner(vocab_size=256, max_model_len=300, **options)
    return EngineCore(fake, Scheduler(fake.capacity, eos_ids=(5,)))


def test_everything_at_once_equals_alone():
    requests = mixed_requests(256, 300)
    expected = plain(make(num_blocks=400), requests)
    core = make(num_blocks=24, max_rows=5, max_tokens_per_step=17)
    got = together(core, requests, preempt=0.1, cancel=("r3",))
    same(expected, got, leave_out=("r3",))
    assert core.stats().preemptions > 5


def test_a_broken_engine_is_noticed():
    requests = mixed_requests(256, 300)
    expected = plain(make(num_blocks=400), requests)
    core = make(num_blocks=400, max_rows=5)
    draw = core.runner._result

    def broken(work):
        result = draw(work)
        if result.tokens and work.start > 40 and len(core.scheduler.running) > 3:
            wrong = (result.tokens[0] + 1) % 256
            core.runner.tokens[work.row][-1] = wrong
            return type(result)(work.row, (wrong,), result.logprobs, result.prompt_logprobs)
        return result

    core.runner._result = broken
    with pytest.raises(AssertionError, match="differ"):
        same(expected, together(core, requests))
