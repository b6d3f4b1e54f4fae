"""The executor's extension points: each has a small executor that passes the oracle."""

from __future__ import annotations

import pytest

from tests.engine.cores import core_of, random_model
from tests.oracle import mixed_requests, plain, same, together

torch = pytest.importorskip("torch")

from tests.runner.recorded import Calibrating, Recorded, Streamed, with_executor  # noqa: E402 - they need torch

MODELS = ["llama", pytest.param("gemma2", marks=pytest.mark.slow), pytest.param("mixtral", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """(folder, requests, their plain answers on the eager executor)."""
    folder = random_model(request.param, tmp_path_factory.mktemp(request.param))
    core = core_of(folder, executor="eager", dtype="float32", threads=1, max_num_seqs=1, num_blocks=40)
    requests = mixed_requests(core.info.vocab_size, 256, count=6, longest=100)
    return folder, requests, plain(core, requests)


def crowded(folder, **options):
    """A core in which requests are cut up, crowded together and preempted."""
    small = {"block_size": 16, "num_blocks": 24, "max_num_seqs": 5, "max_chunk": 48, **options}
    return core_of(folder, executor="eager", dtype="float32", threads=1, **small)


def test_a_step_is_recorded_once_for_each_padded_size_and_replayed(case):
    folder, requests, expected = case
    core = crowded(folder)
    executor = with_executor(core, Recorded)
    same(expected, together(core, requests, seed=3, preempt=0.2))
    assert core.stats().preemptions > 0
    assert 1 < len(executor.recordings) < sum(r.replays for r in executor.recordings.values()) / 4


def test_a_wait_before_each_layer_and_a_signal_after_it(case):
    folder, requests, expected = case
    core = crowded(folder, overlap=True)
    executor = with_executor(core, Streamed)
    same(expected, together(core, requests, seed=4, preempt=0.1))
    assert executor.streaming.waits == executor.streaming.signals > 50


def test_without_the_wait_the_weights_are_not_there(case):
    folder, requests, _ = case
    core = crowded(folder)
    executor = with_executor(core, Streamed)
    executor.streaming.fetch = lambda layer: None
    executor.streaming.before_layer = lambda layer: None
    core.add(requests[0])
    errors = [delta.error for _ in iter(core.has_work, False) for delta in core.step() if delta.finish_reason]
    assert errors and all("NaN" in error for error in errors)


def test_the_inputs_of_linears_are_the_same_batched(case):
    folder, requests, expected = case
    options = {"executor": "eager", "dtype": "float32", "threads": 1, "speculate": "off", "overlap": False}
    alone = core_of(folder, **options, max_num_seqs=1, num_blocks=40)
    first = with_executor(alone, Calibrating)
    same(expected, plain(alone, requests))
    core = crowded(folder, speculate="off", overlap=False)  # a wrong guess, or a step too many, has rows of its own
    second = with_executor(core, Calibrating)
    same(expected, together(core, requests, seed=5, preempt=0.1))
    assert first.seen.keys() == second.seen.keys() == {*first.trace.names.values()}
    assert all(torch.equal(first.seen[name], second.seen[name]) for name in first.seen)
