"""What both runners owe the engine when a row or a step fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.errors import InvalidRequest
from kvasir.inputs import Adapter, Inputs, Span
from kvasir.ops import native
from kvasir.plan import Adapted, pack_ids
from kvasir.types import FinishReason
from tests.engine.cores import random_model
from tests.oracle import plain, same, together
from tests.runner.made import request, small_core

torch = pytest.importorskip("torch")

needs_native = pytest.mark.skipif(not native.available(), reason=native.reason())
pytestmark = pytest.mark.parametrize("executor", ["eager", pytest.param("program", marks=needs_native)])


@pytest.mark.parametrize("where", [{"prompt_logprobs": 1}, {}], ids=["prompt", "sample"])
def test_a_row_of_nan_fails_alone(executor, tmp_path, where):
    """Token 7's embedding is NaN: a sequence that reads it gets an error, its neighbours continue."""
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


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("where", "lead"),
    [
        ({"prompt_logprobs": 1}, 40),
        ({}, 1),
        pytest.param({"prompt_logprobs": 1}, 1, marks=pytest.mark.slow),
        pytest.param({}, 40, marks=pytest.mark.slow),
    ],
    ids=["prompt-40", "sample-1", "prompt-1", "sample-40"],
)
def test_an_error_has_the_same_text_alone_and_batched(executor, tmp_path, where, lead):
    """The text depends on the request alone: not on its row, its neighbours or the pieces its prompt is read in."""
    from safetensors.torch import load_file, save_file

    folder = random_model("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    bad = request("bad", [*([9] * lead), 7, 8], **where)
    good = [request(f"g{i}", [10 + i, 11, 12]) for i in range(3)]
    found = [error_among(small_core(folder, executor), [bad])]
    found += [error_among(small_core(folder, executor, max_chunk=c), [*good, bad]) for c in (5, 16, 24)]
    assert found[0] and {*found} == {found[0]}


def error_among(core, requests) -> str:
    """What the request called bad ends with."""
    for r in requests:
        core.add(r)
    errors = [d.error for _ in iter(core.has_work, False) for d in core.step() if d.id == "bad" and d.finish_reason]
    core.check()
    return errors[0]


def test_sequences_of_a_failed_step_are_retried_alone(executor, tmp_path, monkeypatch):
    core = small_core(random_model("llama", tmp_path), executor)
    requests = [request(f"r{i}", [i + 1] * (5 + i)) for i in range(5)]
    expected = plain(core, requests)
    break_crowded_steps(core.runner, monkeypatch)
    same(expected, together(core, requests, stagger=5))
    assert core.stats().preemptions > 0


@pytest.mark.few(4)
@pytest.mark.parametrize("bad", [300, 1 << 30, -1, -(1 << 31)])
def test_ids_outside_the_vocabulary_reach_no_kernel(executor, tmp_path, bad):
    """Ids from a journal are not checked before: such a request ends with an error, its neighbours continue."""
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
        place, name, count = runner.executor.program, "start", lambda num_works, end: num_works
    else:
        place, name, count = runner.executor.model, "forward", lambda tokens_T, batch: len(batch.starts)
    honest = getattr(place, name)

    def fragile(*arguments):
        if count(*arguments) > 3:
            raise MemoryError("too many at once")
        return honest(*arguments)

    monkeypatch.setattr(place, name, fragile)


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "change",
    [
        ({"pending": (3,)}, "pending"),
        ({"inputs": Inputs((Span(0, 1, b"hash"),))}, "in the place of tokens"),
        ({"inputs": Inputs((Span(0, 1, b"hash", added=True),))}, "added to tokens"),
        ({"inputs": Inputs(positions=pack_ids([0, 1, 5]))}, "positions"),
        ({"inputs": Inputs(bias=bytes(8))}, "bias"),
        ({"inputs": Inputs(encoded=b"hash")}, "cross-attention"),
        ({"adapters": (Adapted(0, 0.5),)}, "a scale"),
        ({"adapters": (Adapted(7),)}, "adapter 7"),
    ],
    ids=lambda change: change[1],
)  # fmt: skip
def test_unsupported_features_are_refused_by_name_and_affect_no_others(executor, tmp_path, change, monkeypatch):
    """Computed without it, the answer would be another one than was asked for, and say nothing of it."""
    core = small_core(random_model("llama", tmp_path), executor)
    change, named = change
    if named == "a scale" and "adapters" in core.runner.executor.computes:
        pytest.skip("this executor computes it")
    good = [request(f"g{i}", [10 + i, 11, 12]) for i in range(3)]
    expected = {k[0]: a.tokens for k, a in plain(core, good).items()}
    execute, (name,) = core.runner.execute, change
    mark = pack_ids([9, 7, 8])

    def asking(plan):
        """The plan, with what no scheduler asks for today in the sequence that begins with `mark`."""
        row = next((j.row for j in plan.joined if j.ids == mark), None)
        joined = tuple(replace(j, **change) if j.row == row and hasattr(j, name) else j for j in plan.joined)
        work = tuple(replace(w, **change) if w.row == row and hasattr(w, name) else w for w in plan.work)
        return execute(replace(plan, joined=joined, work=work))

    monkeypatch.setattr(core.runner, "execute", asking)
    for r in [good[0], request("bad", [9, 7, 8]), *good[1:]]:
        core.add(r)
    tokens: dict[str, list[int]] = {}
    ends = {}
    while core.has_work():
        for d in core.step():
            tokens.setdefault(d.id, []).extend(d.token_ids)
            if d.finish_reason:
                ends[d.id] = d
    bad = ends.pop("bad")
    assert bad.finish_reason is FinishReason.ERROR and not tokens.pop("bad")
    assert "cannot compute" in bad.error and named in bad.error
    assert tokens == expected
    core.check()


def test_an_adapter_that_is_not_loaded_is_refused_when_the_request_comes(executor, tmp_path):
    core = small_core(random_model("llama", tmp_path), executor)
    with pytest.raises(InvalidRequest, match="'mine'") as caught:
        core.add(replace(request("a", [1, 2, 3]), adapters=(Adapter("mine"),)))
    assert caught.value.param == "adapter" and caught.value.hint
    assert not core.has_work()
