"""Gemma 3n as published: its sizes, and the text part of its checkpoints."""

import pytest
import torch

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.altup import deviations_of
from kvasir.models.registry import model_class_for
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.oracle import TOLERANCE, distance, ours, random_ids, randomized, state_of

# google/gemma-3n-E4B-it and, with fewer layers and narrower MLPs, gemma-3n-E2B-it.
E4B = {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "altup_active_idx": 0, "altup_coef_clip": 120.0,
    "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
    "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
    "intermediate_size": [16384] * 35, "laurel_rank": 64,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "max_position_embeddings": 32768,
    "model_type": "gemma3n_text", "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 2,
    "num_kv_shared_layers": 15, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000.0,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512, "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
E2B = {
    **E4B, "num_hidden_layers": 30, "intermediate_size": [8192] * 30, "num_kv_shared_layers": 10,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "layer_types": E4B["layer_types"][:30],
}  # fmt: skip


def read(text, **changes):
    whole = {
        "model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": text,
        "audio_soft_tokens_per_image": 188, "vision_soft_tokens_per_image": 256, "audio_config": {"hidden_size": 1536},
        "vision_config": {"hidden_size": 2048}, "initializer_range": 0.02, "image_token_id": 262145,
    }  # fmt: skip
    return model_class_for(whole).Config.from_hf({**whole, **changes})


def test_the_published_sizes_are_read():
    large, small = read(E4B), read(E2B)
    assert large.owners == (None,) * 20 + (18, 18, 18, 18, 19) * 3 and large.inners == (16384,) * 35
    assert small.owners == (None,) * 20 + (18, 18, 18, 18, 19) * 2 and small.inners == (8192,) * 30
    assert large.windows == ((512,) * 4 + (0,)) * 7 and (large.rope_theta, large.local_theta) == (1e6, 1e4)
    assert (large.streams, large.active, large.rank, large.final_softcap) == (4, 0, 64, 30.0)
    assert large.deviations == (deviations_of(0.95),) * 10 + (None,) * 25
    assert abs(deviations_of(0.95) - 1.6448536) < 1e-6
    assert read({}) == large  # whose fields are the defaults


def test_the_text_part_of_the_multimodal_checkpoint(transformers):
    text = {k: v for k, v in config_of("gemma3n").items() if k != "model_type"}
    hf = randomized(transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**text)))
    ids = random_ids(60, 96)
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    state = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state_of(hf).items()}
    state["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.ones(2, 2)
    state["model.embed_audio.embedding.weight"] = torch.ones(2, 2)
    state["model.language_model.layers.3.self_attn.v_proj.weight"] = torch.ones(1)  # as published: not used
    config = {"model_type": "gemma3n", "text_config": hf.config.to_dict()}
    assert distance(logits_of(ours(config, state), ids), expected) < TOLERANCE
    with pytest.raises(ModelFileError, match=r"layers\.0\.self_attn\.extra"):
        ours(config, state | {"model.language_model.layers.0.self_attn.extra.weight": torch.ones(1)})


@pytest.mark.filterwarnings("ignore")
def test_logits_agree_for_tokens_beyond_the_table_of_the_layers(transformers):
    config = {k: v for k, v in config_of("gemma3n").items() if k != "model_type"}
    config = transformers.Gemma3nTextConfig(**config | {"vocab_size_per_layer_input": 80})
    hf = randomized(transformers.Gemma3nForCausalLM._from_config(config, attn_implementation="eager"))
    ids = [*range(70, 96), *random_ids(20, 96)]
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    assert distance(logits_of(ours(hf.config.to_dict(), state_of(hf)), ids), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"intermediate_size": [16, 16]}, ModelFileError),
        ({"intermediate_size": []}, ModelFileError),
        ({"intermediate_size": ["x"] * 4}, ModelFileError),
        ({"activation_sparsity_pattern": [0.5]}, ModelFileError),
        ({"activation_sparsity_pattern": [1.0, 0.0, 0.0, 0.0]}, ModelFileError),
        ({"activation_sparsity_pattern": ["x"] * 4}, ModelFileError),
        ({"activation_sparsity_scale": [1e9, None, None, None]}, ModelFileError),
        ({"altup_num_inputs": 0}, ModelFileError),
        ({"altup_num_inputs": 1 << 20}, ModelFileError),
        ({"altup_active_idx": 3}, ModelFileError),
        ({"laurel_rank": 0}, ModelFileError),
        ({"num_kv_shared_layers": 3}, ModelFileError),
        ({"use_bidirectional_attention": True}, UnsupportedModel),
        ({"attention_k_eq_v": True}, UnsupportedModel),
    ],
)
def test_bad_fields_are_refused(change, error):
    with pytest.raises(error):
        read({**config_of("gemma3n"), **change})
