"""ModelRunner by hand-written plans on a tiny random model."""

from __future__ import annotations

import pytest

from kvasir.types import FinishReason, Request, SamplingParams
from tests.engine.cores import core_of, random_model
from tests.oracle import plain, same, together

torch = pytest.importorskip("torch")


@pytest.fixture
def core(tmp_path):
    core = core_of(random_model("llama", tmp_path), threads=1, block_size=16)
    yield core
    core.runner.close()


def request(id: str, ids, **params) -> Request:
    params = {"temperature": 0.0, "max_tokens": 6, "seed": 0, "logprobs": 0, "ignore_eos": True, **params}
    return Request(id, tuple(ids), SamplingParams(**params))


@pytest.mark.parametrize("where", [{"prompt_logprobs": 1}, {}], ids=["prompt", "sample"])
def test_a_row_of_nan_ends_alone(core, where):
    """Token 7's embedding is NaN: whoever reads it gets an error, its neighbours their answer."""
    good = [request(f"g{i}", [10 + i, 11, 12]) for i in range(3)]
    expected = plain(core, good)
    core.runner.model.embed.weight[7] = float("nan")
    bad = request("bad", [9, 7, 8], **where)
    reasons, tokens = {}, {}
    for r in [good[0], bad, *good[1:]]:
        core.add(r)
    while core.has_work():
        for d in core.step():
            tokens.setdefault(d.id, []).extend(d.token_ids)
            if d.finish_reason:
                reasons[d.id] = d.finish_reason
    assert reasons.pop("bad") is FinishReason.ERROR
    assert {k: v for k, v in tokens.items() if k != "bad"} == {k[0]: a.tokens for k, a in expected.items()}
    core.check()


def test_a_step_that_raises_is_tried_alone(core):
    requests = [request(f"r{i}", [i + 1] * (5 + i)) for i in range(5)]
    expected = plain(core, requests)
    forward = core.runner.model.forward

    def fragile(tokens_T, batch):
        if len(batch.starts) > 3:
            raise MemoryError("too many at once")
        return forward(tokens_T, batch)

    core.runner.model.forward = fragile
    same(expected, together(core, requests, stagger=5))
    assert core.stats().preemptions > 0


def test_execute_returns_before_the_forward_ends(core):
    import threading

    gate = threading.Event()
    forward = core.runner.model.forward

    def slow(tokens_T, batch):
        assert gate.wait(10)
        return forward(tokens_T, batch)

    core.runner.model.forward = slow
    core.add(request("a", [1, 2, 3]))
    plan = core.scheduler.plan()
    pending = core.runner.execute(plan)
    assert not pending.done()
    gate.set()
    assert len(core.scheduler.commit(plan, core.runner.sample(pending))) == 1


def test_a_window_gives_its_blocks_back(tmp_path):
    core = core_of(random_model("mistral", tmp_path), threads=1, block_size=16, max_chunk=16)
    core.add(request("long", range(1, 100), max_tokens=120))
    most = 0
    while core.has_work():
        core.step()
        most = max(most, core.scheduler.kv.used)
    assert most <= 5, "a window of 40 and a chunk of 16 never need more than 5 blocks of 16"
