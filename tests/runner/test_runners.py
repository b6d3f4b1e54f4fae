"""What both runners owe the engine when a row or a step fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.ops import native
from kvasir.types import FinishReason
from tests.engine.cores import random_model
from tests.oracle import plain, same, together
from tests.runner.made import request, small_core

torch = pytest.importorskip("torch")

needs_native = pytest.mark.skipif(not native.available(), reason=native.reason())
pytestmark = pytest.mark.parametrize("executor", ["eager", pytest.param("program", marks=needs_native)])


@pytest.mark.parametrize("where", [{"prompt_logprobs": 1}, {}], ids=["prompt", "sample"])
def test_a_row_of_nan_ends_alone(executor, tmp_path, where):
    """Token 7's embedding is NaN: whoever reads it gets an error, its neighbours their answer."""
    from safetensors.torch import load_file, save_file

    folder = random_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    core = small_core(folder, executor)
    good = [request(f"g{i}", [10 + i, 11, 12]) for i in range(3)]
    expected = plain(core, good)
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


def test_a_step_that_raises_is_tried_alone(executor, tmp_path, monkeypatch):
    core = small_core(random_model("llama", tmp_path), executor)
    requests = [request(f"r{i}", [i + 1] * (5 + i)) for i in range(5)]
    expected = plain(core, requests)
    break_crowded_steps(core.runner, monkeypatch)
    same(expected, together(core, requests, stagger=5))
    assert core.stats().preemptions > 0


@pytest.mark.parametrize("bad", [300, 1 << 30, -1, -(1 << 31)])
def test_ids_outside_the_vocabulary_reach_no_kernel(executor, tmp_path, bad):
    """What a journal brings is checked by nobody before: such a request ends with an error, its neighbours do not."""
    core = small_core(random_model("llama", tmp_path), executor)
    good = [request(f"g{i}", [10 + i, 11, 12]) for i in range(3)]
    expected = plain(core, good)
    reasons, tokens = {}, {}
    for r in (good[0], replace(request("bad", [9, 7, 8]), resume_ids=((5, bad),)), *good[1:]):
        core.add(r)
    while core.has_work():
        for d in core.step():
            tokens.setdefault(d.id, []).extend(d.token_ids)
            if d.finish_reason:
                reasons[d.id] = d.finish_reason
    assert reasons.pop("bad") is FinishReason.ERROR and set(reasons.values()) == {FinishReason.LENGTH}
    assert {k: v for k, v in tokens.items() if v} == {k[0]: a.tokens for k, a in expected.items()}
    core.check()


def break_crowded_steps(runner, monkeypatch):
    """A step of more than three sequences raises."""
    if runner.info.executor == "program":
        place, name, count = runner.program, "start", lambda num_works, end: num_works
    else:
        place, name, count = runner.model, "forward", lambda tokens_T, batch: len(batch.starts)
    honest = getattr(place, name)

    def fragile(*arguments):
        if count(*arguments) > 3:
            raise MemoryError("too many at once")
        return honest(*arguments)

    monkeypatch.setattr(place, name, fragile)
