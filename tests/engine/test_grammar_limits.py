"""A request that passes a limit of its grammar ends alone and says so; those that share the grammar never notice."""

from __future__ import annotations

from collections import defaultdict

import pytest

from kvasir.guided import sources
from kvasir.guided.grammar import GrammarLimits
from kvasir.types import FinishReason, Request, SamplingParams
from tests.engine.cores import core_of
from tests.guided.walk import ids_of
from tests.oracle import Answer, plain, same

pytest.importorskip("torch")
pytest.importorskip("llguidance")

TRAP = sources.regex("([a-z ]+|X(.{0,9}y.{0,9}z){9})")  # after "X" there are more states than the limit


def asked(name: str, bias: float) -> Request:
    """bias: towards "X"; below 0 for an answer of words."""
    weights = {i: bias * (1 if letter == "X" else 0.5) for letter in "Xayz" for i in ids_of(letter)}
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=40, logprobs=1, logit_bias=weights)
    return Request(name, tuple(range(5, 25)), params, grammar=TRAP)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_beyond_its_limits_ends_only_its_own_request(overlap):
    good = [asked("before", -100.0), asked("beside", -50.0), asked("later", -80.0)]
    expected = plain(core_of("kvasir-mini", threads=1, max_num_seqs=1), good)
    core = core_of("kvasir-mini", threads=2, max_num_seqs=4, overlap=overlap)
    core.scheduler.guides.limits = (GrammarLimits(states=60), GrammarLimits(states=60))
    answers: dict[tuple[str, int], Answer] = defaultdict(Answer)
    for request in (good[0], asked("bad", 100.0), good[1]):
        core.add(request)
    failed = None
    while core.has_work():
        for delta in core.step():
            if delta.id != "bad":
                answers[delta.id, delta.index].take(delta)
            elif delta.finish_reason is FinishReason.ERROR:
                failed = delta
                core.add(good[2])
        core.check()
    assert failed and failed.refused
    assert "grammar" in failed.error and "limits" in failed.error
    same(expected, dict(answers))
    assert core.scheduler.guides.renewed
