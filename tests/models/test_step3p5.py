"""Step-3.5 as published: its sizes and fields, and the text part of the checkpoint for images, Step-3.7."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from kvasir.errors import KvasirError, ModelFileError, UnsupportedModel
from kvasir.models.registry import model_class_for
from kvasir.models.step3p5 import Step3p7
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.hf import load, save
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, ours, random_ids, randomized, state_of
from tests.models.step3p5_text import VISION

LAYERS, DRAFTING = 45, 3
KINDS = ["full_attention", *["sliding_attention"] * 3] * 12
SCALING = {
    "rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 131072, "low_freq_factor": 1.0,
    "high_freq_factor": 32.0,
}  # fmt: skip
FLASH = {
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264,
    "num_hidden_layers": LAYERS, "num_attention_heads": 64, "num_attention_groups": 8, "head_dim": 128,
    "vocab_size": 128896, "max_seq_len": 262144, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "rope_theta": [5e6, 1e4, 1e4, 1e4] * 12, "rope_scaling": SCALING, "yarn_only_types": ["full_attention"],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12, "layer_types": KINDS, "sliding_window": 512,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128,
    },
    "use_moe": True, "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
    "share_expert_dims": 1280, "moe_layers_enum": ",".join(map(str, range(3, LAYERS))), "moe_layer_offset": 0,
    "moe_every_n_layer": 1, "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0,
    "norm_expert_weight": True, "use_moe_router_bias": True, "need_fp32_gate": True, "use_qk_norm": True,
    "use_head_wise_attn_gate": True, "att_impl_type": "GQA", "zero_centered": True, "sink": False,
    "use_rope_layers": [], "tie_word_embeddings": False, "num_nextn_predict_layers": DRAFTING,
    "swiglu_limits": [0.0] * 43 + [7, 7, 0.0, 0.0, 0.0], "swiglu_limits_shared": [0.0] * 43 + [16, 16, 0.0, 0.0, 0.0],
    "bos_token_id": 0, "eos_token_id": [1, 2, 128007], "torch_dtype": "bfloat16",
}  # fmt: skip


def read(**changes: Any) -> Any:
    config = {**FLASH, **changes}
    return model_class_for(config).Config.from_hf(config)


def test_the_published_sizes_are_read():
    c = read()
    assert (c.num_layers, c.drafting, c.heads, c.window_heads, c.kv_heads) == (45, 3, 64, 96, 8)
    assert (c.rotary_dim, c.window_rotary_dim, c.rope_theta, c.window_theta) == (64, 128, 5e6, 1e4)
    assert (c.rope_scaling.kind, c.window_scaling.kind) == ("llama3", "default")
    assert c.windows == (*(0, 512, 512, 512) * 11, 0) and c.more_windows == (512,) * 3
    assert c.sparse == (False,) * 3 + (True,) * 42 and c.more_sparse == (False,) * 3
    assert c.limits[:45] == (0.0,) * 43 + (7.0, 7.0) and c.shared_limits[43:] == (16.0, 16.0, 0.0, 0.0, 0.0)
    assert (c.num_experts, c.routing.top_k, c.routing.scale, c.shared_inner) == (288, 8, 3.0, 1280)


def test_what_transformers_makes_of_the_published_config_is_the_same(transformers):
    text = {name: value for name, value in FLASH.items() if name not in ("architectures", "model_type")}
    theirs = json.loads(json.dumps(transformers.AutoConfig.for_model("step3p5", **text).to_dict()))
    assert "sliding_attention" in theirs["rope_parameters"] and len(theirs["layer_types"]) == LAYERS
    assert model_class_for(theirs).Config.from_hf(theirs) == read()


def test_defaults_are_those_of_transformers(transformers):
    theirs = transformers.AutoConfig.for_model("step3p5").to_dict()
    found = model_class_for({"model_type": "step3p5"}).Config
    assert found.from_hf({"model_type": "step3p5"}) == found.from_hf(theirs)


@pytest.mark.filterwarnings("ignore")
def test_the_text_part_of_the_multimodal_checkpoint(transformers, tmp_path):
    text = config_of("step3p5") | {"model_type": "step3p5"}
    config = transformers.Step3p7Config(text_config=text, vision_config=dict(VISION))
    hf = randomized(transformers.Step3p7ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    ids = random_ids(100, 96)
    with torch.no_grad():
        expected = hf(input_ids=torch.tensor([ids])).logits[0]
    save(hf, tmp_path)
    model = load(tmp_path)
    assert type(model) is Step3p7
    assert distance(logits_of(model, ids), expected) < TOLERANCE


@pytest.mark.filterwarnings("ignore")
def test_fields_of_each_layer_mean_those_of_its_kind(transformers):
    """A published config beside what transformers makes of it, with the same weights."""
    from tests.models.test_against_transformers import oracle

    model = oracle(transformers, "step3p5")
    config, state, ids = model.config.to_dict(), state_of(model), random_ids(60, 96)
    ropes = config.pop("rope_parameters")
    full, sliding = (ropes[f"{kind}_attention"] for kind in ("full", "sliding"))
    by_layer = [ropes[kind] for kind in config["layer_types"]]
    shared = ("rope_theta", "partial_rotary_factor")
    config |= {
        "rope_theta": [rope["rope_theta"] for rope in by_layer],
        "partial_rotary_factors": [rope["partial_rotary_factor"] for rope in by_layer],
        "rope_scaling": {name: value for name, value in full.items() if name not in shared},
        "moe_layers_enum": "2, 3",
        "attention_other_setting": {"num_attention_heads": config.pop("num_sliding_attention_heads")},
        "mlp_layer_types": None,
    }
    assert sliding["rope_type"] == "default"
    expected = logits_of(ours(model.config.to_dict(), state), ids)
    assert torch.equal(logits_of(ours(config, state), ids), expected)
    assert distance(logits_of(ours(config | {"rope_scaling": None}, state), ids), expected) > SENSITIVITY


BAD, NO = ModelFileError, UnsupportedModel
CONFIGS: dict[str, tuple[dict[str, Any], type[KvasirError], str]] = {
    "kinds": ({"layer_types": KINDS[:44]}, BAD, "layer_types"),
    "a kind": ({"layer_types": ["chunked_attention"] * 48}, BAD, "layer_types"),
    "kinds as text": ({"layer_types": "full_attention"}, BAD, "layer_types"),
    "no window": ({"sliding_window": None}, BAD, "sliding_window is missing"),
    "thetas": ({"rope_theta": [5e6, 1e4, 1e4, 2e4] * 12}, BAD, "rope_theta"),
    "many thetas": ({"rope_theta": [5e6] * 49}, BAD, "rope_theta"),
    "a theta as text": ({"rope_theta": "5e6"}, BAD, "rope_theta"),
    "shares": ({"partial_rotary_factors": [0.5, 1.0, 1.0, 0.5] * 12}, BAD, "partial_rotary_factors"),
    "a scaling without a type": ({"rope_scaling": {"factor": 2.0}}, BAD, "has no type"),
    "a scaling of all layers": ({"yarn_only_types": ["full_attention", "sliding_attention"]}, NO, "yarn_only_types"),
    "experts": ({"moe_layers_enum": "3,x"}, BAD, "moe_layers_enum"),
    "experts as an object": ({"moe_layers_enum": {}}, BAD, "moe_layers_enum"),
    "limits": ({"swiglu_limits": [7.0] * 44}, BAD, "swiglu_limits"),
    "a small limit": ({"swiglu_limits_shared": [0.1] * 48}, BAD, "swiglu_limits_shared"),
    "other heads": ({"attention_other_setting": {"num_attention_heads": 97}}, BAD, "97 attention heads"),
    "other groups": ({"attention_other_setting": {"num_attention_groups": 4}}, NO, "num_attention_groups"),
    "another head": ({"attention_other_setting": {"head_dim": 64}}, NO, "head_dim"),
    "few experts": ({"moe_num_experts": 7}, BAD, "n_routed_experts"),
    "softmax": ({"moe_router_activation": "softmax"}, NO, "moe_router_activation"),
    "sinks": ({"sink": True}, NO, "sink"),
    "layers that do not rotate": ({"use_rope_layers": [True] * 48}, NO, "use_rope_layers"),
    "no gates": ({"use_head_wise_attn_gate": False}, NO, "use_head_wise_attn_gate"),
    "another activation": ({"hidden_act": "gelu"}, NO, "hidden_act"),
    "an unknown field": ({"mlp_scale": 2.0}, NO, "mlp_scale"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_config_is_refused_by_name(case):
    changes, error, match = CONFIGS[case]
    with pytest.raises(error, match=match):
        read(**changes)


def test_a_model_for_images_needs_its_text_part():
    config = {"model_type": "step3p7", "architectures": ["Step3p7ForConditionalGeneration"]}
    with pytest.raises(ModelFileError, match="text_config is missing"):
        model_class_for(config).Config.from_hf(config)
