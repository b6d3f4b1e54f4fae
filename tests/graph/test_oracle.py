"""The oracle over the graph executor: a request alone, then with anything beside it, to the bit."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from kvasir.types import Request, SamplingParams
from tests.graph.models import folder_of, graph_core
from tests.oracle import free_blocks, plain, poison, same, together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CASES = [("qwen3", "bfloat16", "auto"), ("gemma2", "float32", "auto")]
CASES += [("llama", "bfloat16", "int8"), ("gemma2", "float32", "fp8")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request, tmp_path_factory):
    """(folder, options, requests, their plain answers)."""
    family, dtype, kv_dtype = request.param
    folder, options = folder_of(tmp_path_factory.mktemp(family), family), {"dtype": dtype, "kv_dtype": kv_dtype}
    core = graph_core(folder, **options, max_num_seqs=1)
    requests = short_requests(core.info.vocab_size)
    return folder, options, requests, plain(core, requests)


def short_requests(vocab: int) -> list[Request]:
    """A few requests, because a step takes the interpreter a second: every kind of parameters, prompts on both sides of
    a block's end and of a bucket's."""
    kinds: list[dict] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "n": 2, "logprobs": 0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 1.3, "prompt_logprobs": 1, "logprobs": 0},
        {"temperature": 0.9, "presence_penalty": 0.7, "min_p": 0.05, "logprobs": 0},
        {"temperature": 1.1, "mirostat": 2, "logprobs": 0},
    ]
    rng, lengths = random.Random(5), (17, 1, 40, 16, 33, 5)
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(vocab) for _ in range(length)),
            SamplingParams(**kind, seed=rng.randrange(2**60), max_tokens=4 + i, ignore_eos=True),
        )
        for i, (kind, length) in enumerate(zip(kinds, lengths, strict=True))
    ]


def test_batched_answers_equal_single_ones(case):
    folder, options, requests, expected = case
    core = graph_core(folder, **options)
    same(expected, together(core, requests))
    assert core.stats().steps < sum(len(answer.tokens) for answer in expected.values()), "nothing was batched"


def test_chunks_preemption_cancelled_neighbours_and_poisoned_blocks(case):
    folder, options, requests, expected = case
    core = graph_core(folder, **options, max_chunk=13, max_num_batched_tokens=37, overlap=True)

    def poisoned(core):
        if not core.scheduler.running:
            poison(core, free_blocks(core))

    cancelled = requests[2].id, requests[5].id
    got = together(core, requests, seed=3, preempt=0.15, cancel=cancelled, each_step=poisoned)
    same(expected, {key: answer for key, answer in got.items() if key[0] not in cancelled}, cancelled)
