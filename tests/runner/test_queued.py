"""Steps that are started before the ids of the last were read."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kvasir.engine.core import EngineCore
from kvasir.guided import sources
from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of, random_model
from tests.oracle import mixed_requests, plain, same, together
from tests.runner import test_runners as failures
from tests.runner.queued import Queued, queue
from tests.sched.one_by_one import OneByOne

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["one", "two"]}, "n": {"type": "integer"}},
    "required": ["a", "n"],
    "additionalProperties": False,
}
OPTIONS = {"executor": "eager", "dtype": "float32", "threads": 1, "speculate": "off"}


def crowded(folder: str, **more) -> tuple[EngineCore, Queued]:
    core = core_of(
        folder, **OPTIONS, **{"block_size": 16, "num_blocks": 24, "max_num_seqs": 5, "max_chunk": 48, **more}
    )
    return core, queue(core)


def requests_of(core: EngineCore, count: int) -> list[Request]:
    """The usual ones, and some whose sampler carries a state from each token to the next."""
    own = SamplingParams(temperature=1.0, mirostat=2, max_tokens=20, seed=5, logprobs=1, ignore_eos=True)
    carried = [Request(f"m{i}", tuple(range(3 + i, 30 + 7 * i)), own) for i in range(2)]
    return [*mixed_requests(core.info.vocab_size, 256, count=count, longest=100), *carried]


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_ids_feed_the_next_step_where_they_were_sampled(kind, tmp_path):
    folder = random_model(kind, tmp_path)
    core = core_of(folder, **OPTIONS, max_num_seqs=1, num_blocks=40)
    requests = requests_of(core, 6)
    expected = plain(core, requests)
    core, executor = crowded(folder)
    same(expected, together(core, requests, seed=3, preempt=0.2, cancel=("r2",)), leave_out=("r2",))
    assert core.stats().preemptions > 0 and executor.early > 5 * executor.late
    core.close()


def test_sampled_ids_are_not_read_before_the_step_is_awaited(tmp_path):
    core, executor = crowded(random_model("llama", tmp_path))
    core.add(requests_of(core, 1)[0])
    core.step()
    with pytest.raises(AssertionError, match="device"):
        executor.last.taken()
    core.close()


@pytest.mark.slow
def test_steps_with_masks_are_started_before_the_ids_of_the_last_were_read():
    core = core_of("kvasir-mini", **OPTIONS, max_num_seqs=1)
    own = {"temperature": 1.5, "seed": 3, "max_tokens": 30, "logprobs": 1}
    requests = [
        Request(f"g{i}", tuple(range(5, 25 + i)), SamplingParams(**own, **more), grammar=sources.json_schema(SCHEMA))
        for i, more in enumerate([{}, {"mirostat": 2}])
    ]
    requests += requests_of(core, 1)
    expected = plain(core, requests)
    core, executor = crowded("kvasir-mini", num_blocks=40)
    same(expected, together(core, requests, seed=5, preempt=0.05))
    assert core.stats().masked_rows > 10 and executor.early > 2 * executor.late
    core.close()


def test_a_step_of_which_drafts_are_checked_is_sampled_first(tmp_path):
    folder = random_model("llama", tmp_path)
    core = core_of(folder, **OPTIONS, max_num_seqs=1, num_blocks=40)
    requests = requests_of(core, 3)
    expected = plain(core, requests)

    class Knowing(OneByOne):
        """Drafts of what will come, every third id of them wrong."""

        def waits(self, sequences):
            return any(seq.counts.computed % 4 == 0 for seq in sequences)

        def guess(self, seq, most):
            coming = expected[seq.request.id, seq.index].tokens[len(seq.tokens) - seq.prompt_len :][:most]
            return [token ^ (i % 3 == 2) for i, token in enumerate(coming)]

    core, executor = crowded(folder, drafter=Knowing())
    same(expected, together(core, requests, seed=7, preempt=0.1))
    assert core.scheduler.accepted_tokens > 10 and executor.early and executor.late
    core.close()


@pytest.mark.parametrize("fails", [
    lambda folder, _: failures.test_a_row_of_nan_fails_alone("queued", folder, {}),
    lambda folder, _: failures.test_ids_outside_the_vocabulary_reach_no_kernel("queued", folder, 300),
    lambda folder, patch: failures.test_sequences_of_a_failed_step_are_retried_alone("queued", folder, patch),
], ids=["row", "plan", "step"])  # fmt: skip
def test_a_step_planned_on_a_failed_step_is_retracted(fails, tmp_path, monkeypatch):
    fails(tmp_path, monkeypatch)
