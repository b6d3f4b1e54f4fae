"""`kvasir run` on third-party files: the Hugging Face folder and its GGUF give the expected text."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvasir import LLM, SamplingParams
from tests._shared import need
from tests.e2e.server import SRC


def kvasir(*args: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.run([sys.executable, "-m", "kvasir.cli", *args], env=env, capture_output=True, text=True)


def stories_case() -> dict:
    cases = json.loads(need("models", "stories260K", "expected.json").read_text())["cases"]
    return next(c for c in cases if c["prompt"] == "Once upon a time")


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [("stories260K",), pytest.param(("gguf", "stories260K-F32.gguf"), marks=pytest.mark.slow)],
    ids=["hf", "gguf"],
)
def test_stories_have_the_expected_text(file):
    case = stories_case()
    n = str(len(case["greedy_ids"]))
    done = kvasir(
        "run", str(need("models", *file)), "Once upon a time",
        "--no-chat", "--temperature", "0", "--dtype", "float32", "--max-tokens", n, "--quiet",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.removesuffix("\n") == case["greedy_text"]


# Largest mean difference of the log-probabilities of known tokens from those of the bfloat16 folder. The 16-bit files
# hold its very values; 8-bit groups were measured to lose 0.0170 with their 8-bit activations, 4-bit groups (in a model
# of width 128) 0.157.
TOLERANCE = {"BF16": 0.0, "F16": 0.0, "Q8_0": 0.02, "Q4_0": 0.2}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", TOLERANCE)
def test_quantized_files_stay_within_their_types_tolerance(kind):
    cases = json.loads(need("models", "TinyStories-656K", "expected.json").read_text())["cases"]
    ids = [c["prompt_ids"] + c["greedy_ids"] for c in cases]

    def scores(file: tuple[str, ...]) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        with LLM(str(need("models", *file)), dtype="float32", progress=False, threads=1) as llm:
            outputs = llm.generate([{"prompt_token_ids": i} for i in ids], params)
        return [next(iter(t.values())).logprob for o in outputs for t in o.prompt_logprobs[1:]]

    plain = scores(("TinyStories-656K",))
    quantized = scores(("gguf", f"TinyStories-656K-{kind}.gguf"))
    error = sum(abs(a - b) for a, b in zip(plain, quantized, strict=True)) / len(plain)
    assert error <= TOLERANCE[kind], error
    if kind == "Q4_0":
        assert error > TOLERANCE["Q8_0"], "4 bits lose more than 8: the file was really read"


def test_an_error_is_a_sentence_and_a_next_step():
    done = kvasir("run", "no/such/folder/here", "x")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error:" in done.stderr and "try:" in done.stderr
