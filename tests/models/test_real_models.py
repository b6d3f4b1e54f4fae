"""Small models that other people trained, against what transformers computed with them (`expected.json`)."""

import json

import pytest
import torch

from kvasir.runner.load import load_model
from kvasir.weights.find import find_model
from tests._shared import need
from tests.models.driver import greedy, logits_of

MODELS = ("stories260K", "TinyStories-656K")
# expected.json has log-probabilities to 5 places.
LOGPROB_TOLERANCE = 1e-4


def expected(name: str) -> list[dict]:
    return json.loads(need("models", name, "expected.json").read_text())["cases"]


def logprobs_of(model, ids):
    return logits_of(model, ids).double().log_softmax(-1)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs(name):
    model = load_model(find_model(need("models", name)), "float32").model
    for case in expected(name):
        prompt, answer = case["prompt_ids"], case["greedy_ids"]
        assert greedy(model, prompt, len(answer)) == answer
        rows = logprobs_of(model, prompt + answer)[len(prompt) - 1 :]
        for row, best in zip(rows, case["top5_logprobs"], strict=False):
            for token, logprob in best:
                assert abs(float(row[token]) - logprob) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    ("file", "name", "tolerance"),
    [
        # Plain numbers of the same values: the same arithmetic.
        ("stories260K-F32.gguf", "stories260K", 0.0),
        ("TinyStories-656K-BF16.gguf", "TinyStories-656K", 0.0),
        # Every bfloat16 weight of this model is a float16 too, or loses its last bits below 6e-5.
        ("TinyStories-656K-F16.gguf", "TinyStories-656K", 1e-3),
        # 8 and 4 bits a weight: what rounding them costs, in logits of about 20.
        ("TinyStories-656K-Q8_0.gguf", "TinyStories-656K", 0.5),
        ("TinyStories-656K-Q4_0.gguf", "TinyStories-656K", 5.0),
    ],
)
def test_a_gguf_file_is_the_same_model(file, name, tolerance):
    plain = load_model(find_model(need("models", name)), "float32")
    packed = load_model(find_model(need("models", "gguf", file)), "float32")
    assert packed.num_parameters == plain.num_parameters
    case = expected(name)[0]
    ids = case["prompt_ids"] + case["greedy_ids"]
    moved = (logits_of(packed.model, ids) - logits_of(plain.model, ids)).abs().max()
    assert moved <= tolerance


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_near(name):
    """The default type: the distribution moves by what 8 bits of mantissa cost, not by more."""
    model = load_model(find_model(need("models", name)), "bfloat16").model
    exact = load_model(find_model(need("models", name)), "float32").model
    case = expected(name)[0]
    ids = case["prompt_ids"] + case["greedy_ids"]
    p, q = logprobs_of(exact, ids), logits_of(model, ids, dtype=torch.bfloat16).double().log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1)
    assert float(divergence.mean()) < 1e-2


def test_dtype_auto_follows_the_checkpoint():
    assert load_model(find_model(need("models", "stories260K"))).dtype == "float32"
    assert load_model(find_model(need("models", "TinyStories-656K"))).dtype == "bfloat16"
