"""Gemma 3 as published: one config for vision and text, of which we use the text part."""

import pytest
import torch

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.gemma3 import Gemma3
from kvasir.models.gemma3_text import Gemma3Config
from kvasir.models.registry import model_class_for
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.hf import load, randomized, save
from tests.models.oracle import TOLERANCE, distance, random_ids

EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, transformers):
    text = {**config_of("gemma3"), "pad_token_id": 0}
    config = transformers.Gemma3Config(text_config=text, vision_config=EYES, mm_tokens_per_image=1)
    model = randomized(transformers.Gemma3ForConditionalGeneration(config))
    ids = random_ids(100, 96)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    return save(model, tmp_path_factory.mktemp("gemma3")), ids, expected


def test_the_text_part_computes_what_transformers_computes(folder):
    path, ids, expected = folder
    assert 1 < expected.abs().max() < 100
    model = load(path)
    assert isinstance(model, Gemma3)
    assert distance(logits_of(model, ids), expected) < TOLERANCE


def test_only_tensors_of_the_vision_part_are_ignored(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    path, *_ = folder
    tensors = load_file(path / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in tensors)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    save_file({**tensors, "language_model.model.layers.0.extra.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="extra"):
        load(tmp_path)


def test_old_and_new_spelling_of_its_two_ropes_are_one():
    new = config_of("gemma3")
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 500.0, "rope_local_base_freq": 20.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}
    assert Gemma3Config.from_hf(old) == Gemma3Config.from_hf(new)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"attn_logit_softcapping": 50.0}, UnsupportedModel),
        ({"layer_types": ["chunked_attention"] * 4}, UnsupportedModel),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, ModelFileError),
        ({"rope_parameters": [1]}, ModelFileError),
        ({"rope_parameters": {"full_attention": [1]}}, ModelFileError),
        ({"sliding_window": None}, ModelFileError),
        ({"sliding_window_pattern": 0}, ModelFileError),
        ({"query_pre_attn_scalar": 0}, ModelFileError),
    ],
)
def test_unsupported_gemma3_fields_are_refused(change, error):
    with pytest.raises(error, match=next(iter(change)).removesuffix("_parameters")):
        Gemma3Config.from_hf({**config_of("gemma3"), **change})


def test_a_whole_config_without_text_or_of_another_format_is_refused():
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    read = model_class_for(whole).Config.from_hf
    with pytest.raises(ModelFileError, match="text_config"):
        read(whole)
    with pytest.raises(UnsupportedModel, match="awq"):
        read({**whole, "text_config": config_of("gemma3"), "quantization_config": {"quant_method": "awq"}})
    assert read({**whole, "text_config": config_of("gemma3")}).windows == (20, 0, 20, 0)
