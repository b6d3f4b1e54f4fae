"""Gemma 4 as published: its sizes, and checkpoints for text, images and sounds, of which we use the text part."""

import pytest
import torch

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.gemma4 import Gemma4
from kvasir.models.registry import model_class_for
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.oracle import TOLERANCE, distance, dummy, ours, random_ids, randomized, state_of
from tests.models.state_spaces import ABSENT

ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}


def published(layers: int, pattern: int, **sizes):
    """The text part of a published config: what is the same in all of them, and its sizes."""
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    return {
        "model_type": "gemma4_text", "attention_bias": False, "attention_dropout": 0.0, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "layer_types": kinds,
        "num_hidden_layers": layers, "rms_norm_eps": 1e-6, "rope_parameters": ROPES, "tie_word_embeddings": True,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "expert_intermediate_size": None,
        "use_bidirectional_attention": "vision", **sizes,
    }  # fmt: skip


E4B = published(
    42, 6, hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=2,
    num_global_key_value_heads=None, hidden_size_per_layer_input=256, num_kv_shared_layers=18, sliding_window=512,
    max_position_embeddings=131072, attention_k_eq_v=False, enable_moe_block=False, use_double_wide_mlp=False,
    num_experts=None, top_k_experts=None, moe_intermediate_size=None, use_bidirectional_attention=None,
)  # fmt: skip
LARGE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 1024,
         "max_position_embeddings": 262144, "attention_k_eq_v": True}  # fmt: skip
DENSE_31B = published(
    60, 6, hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16,
    num_global_key_value_heads=4, enable_moe_block=False, num_experts=None, top_k_experts=None, **LARGE,
)  # fmt: skip
MOE_26B = published(
    30, 6, hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8,
    num_global_key_value_heads=2, enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    **LARGE,
)  # fmt: skip


def read(text, model_type="gemma4", architecture="Gemma4ForConditionalGeneration"):
    whole = {"model_type": model_type, "architectures": [architecture], "text_config": text, "vision_config": {}}
    return model_class_for(whole).Config.from_hf(whole)


def test_the_published_sizes_are_read():
    small, dense, moe = read(E4B), read(DENSE_31B), read(MOE_26B)
    assert small.owners == (None,) * 24 + ((22,) * 5 + (23,)) * 3
    assert (small.per_layer_width, small.num_experts, set(small.inners)) == (256, 0, {10240})
    assert dense.head_dims == ((256,) * 5 + (512,)) * 10 and dense.kv_heads_of == ((16,) * 5 + (4,)) * 10
    assert dense.keys_as_values and not dense.per_layer_width and set(dense.owners) == {None}
    assert (moe.num_experts, moe.top_k, moe.expert_inner, moe.inner) == (128, 8, 704, 2112)
    assert dense.rope_scaling.share == 0.25 and (dense.rope_theta, dense.local_theta) == (1e6, 1e4)


def test_layers_whose_numbers_transformers_fills_up_with_zeros_are_read(transformers):
    config = {**transformers.AutoConfig.for_model("gemma4_text").to_dict(), "architectures": ["Gemma4ForCausalLM"]}
    assert "05" in config["per_layer_config"]
    bare = {name: value for name, value in config.items() if name != "per_layer_config"}
    kind = model_class_for(config)
    assert kind.Config.from_hf(config) == kind.Config.from_hf(bare)


def test_a_unified_config_has_defaults_of_its_own():
    c = read({"num_hidden_layers": 12}, "gemma4_unified", "Gemma4UnifiedForConditionalGeneration")
    assert (c.max_position, set(c.windows), c.per_layer_width) == (262144, {0, 1024}, 0)


@pytest.mark.parametrize("kind", ["Gemma4", "Gemma4Unified"])
def test_the_text_part_of_the_multimodal_checkpoint(transformers, kind):
    unified = kind == "Gemma4Unified"
    text = {**config_of("gemma4"), "pad_token_id": 0, "model_type": f"gemma4{'_unified' * unified}_text"}
    if unified:
        text = {k: v for k, v in text.items() if "per_layer_input" not in k}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=None, audio_config=None)
    hf = randomized(getattr(transformers, f"{kind}ForConditionalGeneration")(config))
    ids = random_ids(60, 96)
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    state = state_of(hf)
    for name in (
        "vision_tower.encoder.weight",
        "embed_audio.weight",
        "language_model.layers.5.self_attn.k_proj.weight",
    ):
        state[f"model.{name}"] = torch.ones(1)  # as published: not used
    model = ours({**config.to_dict(), "architectures": [f"{kind}ForConditionalGeneration"]}, state)
    assert isinstance(model, Gemma4)
    assert distance(logits_of(model, ids), expected) < TOLERANCE
    with pytest.raises(ModelFileError, match="extra"):
        ours(config.to_dict(), state | {"model.language_model.layers.0.extra.weight": torch.ones(1)})


def test_a_token_beyond_the_table_of_the_layers_has_its_first_row():
    model = dummy({**config_of("gemma4"), "vocab_size_per_layer_input": 90})
    ids = [*random_ids(20, 90), 95, *random_ids(20, 90, 1)]
    whole = dummy({**config_of("gemma4"), "vocab_size_per_layer_input": 96})
    for path, leaf in model.walk():
        other = dict(whole.walk())[path]
        if path == "per_layer.embed":
            other.weight = torch.cat([leaf.weight, leaf.weight[:1].expand(6, -1)])
        elif leaf.expects():
            vars(other).update({k: v for k, v in vars(leaf).items() if k in ("weight", "weights", "value")})
    assert torch.equal(logits_of(model, ids), logits_of(whole, ids))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"num_kv_shared_layers": 6}, ModelFileError),
        ({"num_kv_shared_layers": 5}, ModelFileError),
        ({"global_head_dim": 31}, ModelFileError),
        ({"per_layer_config": {"9": {"head_dim": 16}}}, ModelFileError),
        ({"per_layer_config": {"1": {"head_dim": 32}}}, UnsupportedModel),
        ({"per_layer_config": {"1": {"attention_window": 32}}}, UnsupportedModel),
        ({"per_layer_config": [1]}, ModelFileError),
        ({"per_layer_config": {"1": {}, "01": {}}}, ModelFileError),
        ({"rope_parameters": [1]}, ModelFileError),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1.0, "x": 1}}},
            UnsupportedModel,
        ),
        ({"use_bidirectional_attention": "all"}, UnsupportedModel),
        ({"enable_moe_block": True}, ModelFileError),
        ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8}, ModelFileError),
        ({"hidden_size_per_layer_input": -1}, ModelFileError),
        ({"altup_num_inputs": 4, "layer_laurel_rank": 8}, UnsupportedModel),
    ],
)
def test_bad_fields_are_refused(change, error):
    config = {k: v for k, v in config_of("gemma4").items() if v is not ABSENT}
    with pytest.raises(error):
        model_class_for(config).Config.from_hf({**config, **change})
