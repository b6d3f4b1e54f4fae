"""What an engine counts of its work, against what the requests need."""

from __future__ import annotations

import pytest

from kvasir.engine.core import EngineCore
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.statistics import EngineStats
from tests.sched.drive import request


def answered(
    *lengths: int, num_blocks: int = 400, max_tokens: int = 8, overlaps: bool = False, n: int = 1
) -> EngineStats:
    """After a request of each length, all at once."""
    fake = FakeRunner(num_blocks=num_blocks, max_tokens_per_step=32, max_rows=4, overlaps=overlaps)
    core = EngineCore(fake, Scheduler(fake.capacity))
    for i, length in enumerate(lengths):
        prompt = [(i * 31 + j * 7) % 97 for j in range(length)]
        core.add(request(f"r{i}", prompt, max_tokens=max_tokens, ignore_eos=True, n=n))
    while core.has_work():
        core.step()
    return core.stats()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_every_token_but_the_last_of_an_answer_is_computed(n, overlaps):
    stats = answered(50, 1, 9, n=n, overlaps=overlaps)
    assert stats.generated_tokens == 3 * n * 8
    assert stats.computed_tokens == stats.prompt_tokens + stats.generated_tokens - 3 * n


def test_what_preempted_answers_compute_again_is_counted():
    roomy, tight = (answered(10, 11, 12, 13, num_blocks=blocks, max_tokens=60) for blocks in (400, 20))
    assert tight.preemptions > 0 == roomy.preemptions and tight.evicted_blocks > 0
    assert tight.computed_tokens > roomy.computed_tokens and tight.generated_tokens == roomy.generated_tokens
