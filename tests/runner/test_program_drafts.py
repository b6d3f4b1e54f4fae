"""Drafts on the program executor: the same bits as token by token, for every kind of sampling parameters."""

from __future__ import annotations

import pytest

from kvasir.plan import Join, SamplingSpec, StepPlan, Work, pack_ids
from tests.engine.cores import random_model
from tests.runner.drafted import KINDS, Sequences
from tests.runner.made import small_core

pytest.importorskip("torch")

from kvasir.program import marshal, program
from kvasir.runner import program_executor
from kvasir.runner.runner import Runner

ROWS = {"max_num_seqs": len(KINDS), "num_blocks": 1 + 4 * len(KINDS), "max_num_batched_tokens": 64}


def runner_of(folder: str, **options) -> Runner:
    runner = small_core(folder, "program", **{**ROWS, **options}).runner
    assert isinstance(runner, Runner)
    return runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder):
    """Each alone."""
    runner = runner_of(folder)
    return {name: answer for kind in KINDS for name, answer in Sequences(runner, [kind]).run().items()}


@pytest.mark.parametrize(("threads", "chosen"), [(1, 32), (2, 32), (2, 2), pytest.param(1, 5, marks=pytest.mark.slow)])
def test_the_same_bits_with_drafts(folder, expected, monkeypatch, threads, chosen):
    """chosen: rows of logits that the buffer holds."""
    for module in (marshal, program, program_executor):
        monkeypatch.setattr(module, "MAX_CHOSEN", chosen)
    runner = runner_of(folder, threads=threads)
    for seed in range(2):
        sequences = Sequences(runner, [*KINDS], expected, seed=seed)
        assert sequences.run() == expected
        assert 0.2 < sequences.accepted / sequences.drafted < 0.9 and sequences.drafted > 50
    runner.close()


def test_no_logits_are_computed_twice(folder, expected, monkeypatch):
    runner = runner_of(folder)
    assert isinstance(runner.executor, program_executor.ProgramExecutor)
    monkeypatch.setattr(runner.executor.program, "logits_of", None)
    names = ["greedy", "dry", "described mask", "mirostat", "mirostat mask"]
    sequences = Sequences(runner, names, expected)
    monkeypatch.setattr(sequences, "draft", lambda name, room, draft=sequences.draft: draft(name, room)[:5])
    assert sequences.run() == {name: expected[name] for name in names}
    assert sequences.accepted > 20
    runner.close()


def works_of(first: list[int], draft: list[int], spec: SamplingSpec) -> StepPlan:
    join = Join(0, pack_ids(first), len(first), spec)
    count = len(first) + len(draft)
    return StepPlan(0, (join,), (Work(0, 0, count, ((0, (1,)),), pack_ids(draft), len(draft), sample=True),))


@pytest.mark.parametrize("masked", [False, True])
def test_an_error_at_a_drafted_id_ends_the_draft_before_it(folder, masked):
    """After token 5, which is drawn at once, nothing is allowed."""
    runner = runner_of(folder)
    spec = SamplingSpec(
        logit_bias=((5, 1000.0),), bad_words=tuple((5, token) for token in range(300) if not masked), guided=masked
    )
    result = runner.sample(runner.execute(works_of([1, 2], [5, 5, 7], spec)), _after_5(masked, [2, 5, 5, 7]))
    assert (result.rows[0].tokens, result.rows[0].accepted, result.rows[0].error) == ((5,), 0, "")
    work = Work(0, 2, 1, sample=True)
    result = runner.sample(runner.execute(StepPlan(1, work=(work,))), _after_5(masked, [5]))
    assert "no token" in result.rows[0].error
    runner.close()


def _after_5(masked: bool, before: list[int]) -> dict[int, bytes]:
    return {0: b"".join(bytes(40) if token == 5 else b"\xff" * 40 for token in before)} if masked else {}
