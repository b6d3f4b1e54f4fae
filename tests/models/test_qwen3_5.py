"""Qwen3.5: its config, and the text part of the multimodal checkpoint."""

from __future__ import annotations

import json

import pytest
import torch

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.qwen3_5 import Qwen35, Qwen35Moe
from kvasir.models.registry import model_class_for
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.hf import load, randomized, save
from tests.models.oracle import TOLERANCE, distance, random_ids

VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [],
}  # fmt: skip


def read(family="qwen3-5", **changes):
    config = {**config_of(family), **changes}
    return model_class_for(config).Config.from_hf(config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "theirs", "ours"), [
    ("qwen3-5", "Qwen3_5", Qwen35),
    ("qwen3-5-moe", "Qwen3_5Moe", Qwen35Moe),
])  # fmt: skip
def test_the_text_part_of_the_multimodal_checkpoint(family, theirs, ours, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of this test")
    text = config_of(family)
    kind, config_kind = (
        getattr(transformers, f"{theirs}ForConditionalGeneration"),
        getattr(transformers, f"{theirs}Config"),
    )
    config = config_kind(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    hf = randomized(kind._from_config(config, attn_implementation="eager"))
    ids = random_ids(150, text["vocab_size"])
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    save(hf, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert "text_config" in stored
    model = load(tmp_path)
    assert type(model) is ours
    assert distance(logits_of(model, ids), expected) < TOLERANCE


def test_what_has_no_code_is_refused():
    for change in ({"attn_output_gate": False}, {"mlp_only_layers": [1]}, {"mamba_ssm_dtype": "bfloat16"}):
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            read(**change)
    with pytest.raises(UnsupportedModel, match="mrope_interleaved"):
        read(rope_parameters={"mrope_interleaved": False})
    with pytest.raises(UnsupportedModel, match="norm_topk_prob"):
        read("qwen3-5-moe", norm_topk_prob=False)
    with pytest.raises(ModelFileError, match="mrope_section"):
        read(rope_parameters={"mrope_section": "11"})
    with pytest.raises(ModelFileError, match="rope_parameters"):
        read(rope_parameters=[1])
    with pytest.raises(ModelFileError, match="text_config"):
        model_class_for({"model_type": "qwen3_5"}).Config.from_hf({"model_type": "qwen3_5"})


def test_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of this test")
    theirs = transformers.Qwen3_5TextConfig()
    config = {"model_type": "qwen3_5_text", "vocab_size": 100, "hidden_size": 64, "num_attention_heads": 8}
    ours = model_class_for(config).Config.from_hf({**config, "num_hidden_layers": 8, "max_position_embeddings": 64})
    assert (ours.head_dim, ours.kv_heads, ours.inner) == (256, theirs.num_key_value_heads, theirs.intermediate_size)
    assert (ours.delta.qk, ours.delta.v) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
    assert ours.rotary_dim == 64 and ours.recurrent == (True, True, True, False) * 2 and not any(ours.sparse)
