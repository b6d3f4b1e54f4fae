"""A program's hooks: each has a small executor that passes the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.cores import core_of, random_model
from tests.oracle import mixed_requests, plain, same, together

pytest.importorskip("torch")

from kvasir.program.calls import Hooks
from tests.program.made import Driver, bits, loaded, program_of
from tests.runner.hooked import Calibrating, Sent, Streamed, matrices

SLOW = [pytest.param((kind, "bfloat16"), marks=pytest.mark.slow) for kind in ("gemma2", "mixtral")]
CASES = [("llama", "float32"), *SLOW]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(options of a core, requests, their plain answers by the program without hooks)."""
    kind, dtype = request.param
    options = {"model": random_model(kind, tmp_path_factory.mktemp(kind)), "executor": "program", "dtype": dtype}
    core = core_of(**options, threads=1, max_num_seqs=1, num_blocks=40)
    requests = mixed_requests(core.info.vocab_size, 256, count=6, longest=100)
    return options, requests, plain(core, requests)


def crowded(options, **more):
    """A core in which requests are cut up, crowded together and preempted."""
    small = {"block_size": 16, "num_blocks": 24, "max_num_seqs": 5, "max_chunk": 48, "threads": 2, **more}
    return core_of(**options, **small)


def test_a_wait_before_each_layer_and_a_signal_after_it(case):
    options, requests, expected = case
    core = crowded(options, overlap=True)
    streaming = Streamed(core).streaming
    same(expected, together(core, requests, seed=4, preempt=0.1))
    assert streaming.waits == streaming.signals > 50 and core.stats().preemptions > 0


def test_without_the_wait_the_weights_are_not_there(case):
    options, requests, _ = case
    core = crowded(options)
    streaming = Streamed(core).streaming
    streaming.fetch = lambda layer: None
    streaming.before_layer = lambda layer: None
    core.add(requests[0])
    errors = [delta.error for _ in iter(core.has_work, False) for delta in core.step() if delta.finish_reason]
    assert errors and all("NaN" in error for error in errors)


def test_a_layers_keys_and_values_are_there_when_it_ends(case):
    options, requests, expected = case
    core = crowded(options)
    sent = Sent(core)
    same(expected, together(core, requests, seed=6, preempt=0.1, each_step=lambda core: sent.check()))
    assert sent.elsewhere.keys() == set(range(len(sent.trace.ends)))


def test_the_inputs_of_linears_are_the_same_batched(case):
    options, requests, expected = case
    alone = core_of(**options, threads=1, max_num_seqs=1, num_blocks=40, speculate="off")
    first = Calibrating(alone)
    same(expected, plain(alone, requests))
    core = crowded(options, speculate="off", overlap=False)  # a wrong guess, or a step too many, has rows of its own
    second = Calibrating(core)
    same(expected, together(core, requests, seed=5, preempt=0.1))
    assert first.seen.keys() == second.seen.keys() == {*first.trace.names.values()}
    assert all(np.array_equal(first.seen[name], second.seen[name]) for name in first.seen)


def test_the_inputs_of_experts_do_not_depend_on_chunks(tmp_path):
    """A step of 250 rows takes experts two passes; each linear gets the same rows in it as in small steps."""
    model = loaded("mixtral", tmp_path)
    ids = [*np.random.default_rng(1).integers(0, 256, 250)]

    def rows_seen(step: int) -> dict[str, list[bytes]]:
        seen: dict[str, list[bytes]] = {}
        hooks = Hooks(inputs=lambda name, x: seen.setdefault(name, []).extend(row.tobytes() for row in x))
        driver = Driver(program_of(model, rows=256, threads=2, hooks=hooks), ids)
        for start in range(0, 250, step):
            driver.hidden(start, min(step, 250 - start))
        return {name: sorted(rows) for name, rows in seen.items()}

    whole = rows_seen(250)
    assert whole.keys() == {*model.trace.names.values()}
    down = [len(rows) for name, rows in whole.items() if ".experts." in name and name.endswith(".down")]
    assert sum(down) == 250 * len(model.trace.ends) * model.model.layers[0].mlp.routing.top_k
    assert whole == rows_seen(37)


def test_a_program_has_calls_only_for_its_hooks(tmp_path):
    model = loaded("llama", tmp_path)
    plain, seen = program_of(model), []
    hooked = program_of(model, hooks=Hooks(seen.append, lambda layer, x: seen.append((layer, x.shape))))
    assert "call" not in [one.op for one in plain.lowered.instructions]
    assert [one.op for one in hooked.lowered.instructions if one.op != "call"] == [
        one.op for one in plain.lowered.instructions
    ]
    rows = [Driver(program, [5, 6, 7, 8]).hidden(0, 4) for program in (plain, hooked)]
    assert np.array_equal(*map(bits, rows))
    assert seen == [0, (0, (4, 64)), 1, (1, (4, 64))]
    assert len(matrices(model.trace)) == 2


def test_an_error_in_a_hook_is_that_of_the_step(tmp_path):
    calls = []

    def fail(layer):
        calls.append(layer)
        if len(calls) == 1:
            raise OSError("the disk is gone")

    driver = Driver(program_of(loaded("llama", tmp_path), hooks=Hooks(fail)), [5, 6, 7, 8])
    with pytest.raises(OSError, match="the disk is gone"):
        driver.hidden(0, 4)
    driver.hidden(0, 4)
    assert calls == [0, 0, 1]
