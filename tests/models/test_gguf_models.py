"""GGUF models compute what the folders they were made from compute: llama.cpp's own files, then files of every
architecture that gguf-py writes from random models of transformers."""

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from tests._shared import need
from tests.models.driver import greedy, logits_of
from tests.models.hf import load, randomized, save
from tests.models.oracle import TOLERANCE, distance, random_ids

# --- llama.cpp's files ------------------------------------------------------------------------------


def prompts(folder: str) -> list[dict]:
    return json.loads(need("models", folder, "expected.json").read_text())["cases"]


def both(name: str, folder: str):
    return load(need("models", "gguf", f"{name}.gguf")), load(need("models", folder))


@pytest.mark.parametrize(
    ("name", "folder"), [("stories260K-F32", "stories260K"), ("TinyStories-656K-BF16", "TinyStories-656K")]
)
def test_the_same_weights_give_the_same_bits(name, folder):
    found, expected = both(name, folder)
    ids = random_ids(200, 512)
    assert torch.equal(logits_of(found, ids), logits_of(expected, ids))


# Least bits first; each bound is twice what was found, a wrong scale or order gives about 1.
@pytest.mark.parametrize(("kind", "bound"), [("Q4_0", 0.3), ("Q8_0", 0.02), ("F16", 1e-5)])
def test_quantized_weights_give_logits_nearby(kind, bound):
    found, expected = both(f"TinyStories-656K-{kind}", "TinyStories-656K")
    ids = random_ids(200, 2048)
    assert distance(logits_of(found, ids), logits_of(expected, ids)) < bound
