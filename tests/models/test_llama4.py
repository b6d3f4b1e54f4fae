"""Llama 4: the text part of the multimodal checkpoint."""

from __future__ import annotations

import pytest
import torch

from kvasir.models.llama4 import Llama4
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.hf import load, randomized, save
from tests.models.oracle import TOLERANCE, distance, random_ids

VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_the_text_part_of_the_multimodal_checkpoint(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of this test")
    config = transformers.Llama4Config(text_config=config_of("llama4"), vision_config=VISION, tie_word_embeddings=False)
    kind = transformers.Llama4ForConditionalGeneration
    hf, ids = randomized(kind._from_config(config, attn_implementation="eager")), random_ids(100, 96)
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    model = load(save(hf, tmp_path))
    assert type(model) is Llama4
    assert distance(logits_of(model, ids), expected) < TOLERANCE
