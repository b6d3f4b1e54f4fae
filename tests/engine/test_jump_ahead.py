"""Forced ids are accepted without sampling, with the log-probabilities of sampled ids, bit for bit."""

from __future__ import annotations

import pytest

from kvasir.guided import sources
from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of
from tests.oracle import plain, same, together

pytest.importorskip("torch")
pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "description of the weather": {"enum": ["sunny", "rain"]},
        "temperature outside": {"type": "integer"},
    },
    "required": ["description of the weather", "temperature outside"],
    "additionalProperties": False,
}


def asked(name: str, **params) -> Request:
    fixed = {"temperature": 1.5, "seed": 3, "max_tokens": 60, "logprobs": 3}
    prompt = tuple(5 + i % 60 for i in range(40))
    return Request(name, prompt, SamplingParams(**fixed | params), grammar=sources.json_schema(SCHEMA))


REQUESTS = [
    asked("logprobs"),
    asked("of the prompt, too", prompt_logprobs=1),
    asked("of the prompt alone", prompt_logprobs=0, logprobs=None),
    asked("several", n=3, logprobs=0),
    asked("cut", max_tokens=11),
    asked("carry", mirostat=2),
]


# A cell of the composition matrix shows it on the eager executor with every change.
@pytest.fixture(scope="module", params=["program", pytest.param("eager", marks=pytest.mark.slow)])
def case(request):
    """(options, their answers token by token)."""
    options = {"model": "kvasir-mini", "executor": request.param, "block_size": 16}
    core = core_of(**options, threads=1, max_num_seqs=1, jump_ahead=False)
    expected = plain(core, REQUESTS)
    assert core.stats().forced_tokens == 0
    return options, expected


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_forced_ids_have_the_log_probabilities_of_sampled_ids(case, overlap):
    options, expected = case
    core = core_of(**options, threads=2, max_chunk=7, overlap=overlap)
    same(expected, together(core, REQUESTS, seed=2))
    assert core.stats().forced_tokens > 50
    same(expected, together(core, REQUESTS, seed=5, preempt=0.4))
    assert core.stats().preemptions > 5


def test_jump_ahead_takes_fewer_steps(case):
    options, expected = case
    core = core_of(**options, threads=1)
    steps = len(expected["logprobs", 0].tokens)
    same({k: v for k, v in expected.items() if k[0] == "logprobs"}, plain(core, REQUESTS[:1]))
    assert core.stats().steps < 0.7 * steps
