"""Files in quantized formats: the graph executor's log-probabilities against those of the eager executor in float32,
which computes with the file's values."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from kvasir.types import Request, SamplingParams, Task
from tests._shared import need
from tests.engine.cores import core_of
from tests.graph.models import graph_core
from tests.graph.test_against_eager import prompt_logprobs

PROMPT = tuple(range(3, 13))
FORMATS = ["Q8_0", "Q4_0", "BF16"]


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_prompt_logprobs_of_a_gguf_file(format):
    path = need("models", "gguf", f"TinyStories-656K-{format}.gguf")
    expected = prompt_logprobs(core_of(str(path), dtype="float32", executor="eager", threads=1), PROMPT)
    core = graph_core(str(path), dtype="bfloat16", max_num_seqs=1, max_num_batched_tokens=16)
    got = prompt_logprobs(core, PROMPT)
    error = np.abs(got - expected)
    assert got.shape == expected.shape and error.mean() < 0.03 and error.max() < 0.15  # of bfloat16 rows


@pytest.mark.slow
def test_an_embedding_model_whose_tokens_see_each_other():
    path = need("models", "gguf", "all-MiniLM-L6-v2-Q4_K_M.gguf")
    asked = Request("e", tuple(range(1000, 1012)), SamplingParams(seed=0, max_tokens=1), Task.EMBED)
    found = []
    for core in (
        core_of(str(path), dtype="float32", executor="eager", threads=1),
        graph_core(str(path), dtype="float32", max_num_batched_tokens=None),
    ):
        core.add(asked)
        deltas = [delta for _ in iter(core.has_work, False) for delta in core.step()]
        found.append(next(np.array(delta.embedding) for delta in deltas if delta.embedding is not None))
    expected, got = found
    assert np.abs(got - expected).max() < 1e-5
