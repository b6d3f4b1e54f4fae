"""Log-probabilities of the graph executor against those of the eager executor."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from safetensors.torch import load_file, save_file

from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of
from tests.graph.models import folder_of, graph_core

FAMILIES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "qwen2-windows", "llama-biased-tied", "qwen2-yarn"]
FAMILIES += ["mixtral", "qwen3-moe", "qwen3-moe-mixed", "gemma4", "gemma4-moe"]
LAYERS = {"gemma4": 6, "gemma4-moe": 3}  # as many as have kinds; two of the others
# Of a log-probability, mean and greatest. In bfloat16 rounding may choose another expert for a row.
TOLERANCE = {"float32": (2e-5, 2e-4), "bfloat16": (0.03, 0.6)}
# Gemma 4 does not scale its scores. With weights around 1 in the norms of queries and keys, bfloat16 alone changes the
# log-probabilities of gemma4 by 0.22 on average in the eager executor and by 0.33 in transformers, and those of
# gemma4-moe by 0.07 in the eager executor. With a third of these weights it is 0.01.
NORMS, SCALE = re.compile(r"\.[qk]_norm\.weight$"), 0.35


def prompt_logprobs(core, prompt: tuple[int, ...]) -> np.ndarray:
    """Of the prompt's own ids and of the best one at each position."""
    core.add(Request("r", prompt, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, seed=0)))
    found = []
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            if delta.prompt_logprobs is not None:
                found += [(entry.logprob, entry.top[0][1]) for entry in delta.prompt_logprobs if entry]
    return np.array(found)


def scale_scores(weights: Path) -> None:
    """Makes the scores of Gemma 4 as small as those of models that scale them."""
    tensors = load_file(weights)
    save_file({name: t * SCALE if NORMS.search(name) else t for name, t in tensors.items()}, weights)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_are_those_of_the_eager_executor(family, dtype, tmp_path):
    folder = folder_of(tmp_path, family, num_hidden_layers=LAYERS.get(family, 2))
    if family in LAYERS:
        scale_scores(tmp_path / "model.safetensors")
    prompt = tuple((7 * i * i + 3 * i) % 96 for i in range(1, 41))
    expected = prompt_logprobs(core_of(folder, dtype=dtype, executor="eager", threads=1, block_size=16), prompt)
    got = prompt_logprobs(graph_core(folder, dtype=dtype), prompt)
    assert got.shape == expected.shape == (39, 2)
    (mean, most), error = TOLERANCE[dtype], np.abs(got - expected)
    assert error.mean() < mean and error.max() < most
