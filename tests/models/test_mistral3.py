"""Mistral 3: the text part of the multimodal checkpoint, of either kind."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.mistral import Mistral3, Mistral3Config
from kvasir.models.mistral4 import Mistral4
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.hf import load, randomized, save
from tests.models.oracle import TOLERANCE, distance, random_ids

VISION = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["ministral3", "mistral", "mistral4"])
@pytest.mark.parametrize("new_names", [False, True])
def test_the_text_part_of_the_multimodal_checkpoint(family, new_names, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of this test")
    text = config_of(family)
    config = transformers.Mistral3Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    hf = randomized(transformers.Mistral3ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    config.image_token_index = 10_000  # no token of these
    ids = random_ids(150, text["vocab_size"])
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    save(hf, tmp_path)
    if new_names:
        tensors = load_file(tmp_path / "model.safetensors")
        renamed = {n.replace("language_model.model.", "model.language_model."): t for n, t in tensors.items()}
        save_file(
            {n.replace("language_model.lm_head", "lm_head"): t for n, t in renamed.items()},
            tmp_path / "model.safetensors",
        )
    assert "text_config" in json.loads((tmp_path / "config.json").read_text())
    model = load(tmp_path)
    assert type(model) is (Mistral4 if family == "mistral4" else Mistral3)
    assert (model.config.growth is not None) == (family != "mistral")
    assert distance(logits_of(model, ids), expected) < TOLERANCE


def test_another_text_model_is_refused():
    with pytest.raises(UnsupportedModel, match="qwen2"):
        Mistral3Config.from_hf({"text_config": {**config_of("qwen2-windows"), "model_type": "qwen2"}})
    with pytest.raises(ModelFileError, match="text_config is missing"):
        Mistral3Config.from_hf({})
