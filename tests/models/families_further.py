"""Tiny configurations of further decoders, as in `families`, and the changes of single fields that the logits must
notice, as in `test_against_transformers`."""

from __future__ import annotations

from typing import Any

from tests.models.family_parts import LLAMA3
from tests.models.state_spaces import ABSENT

_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_OTHER_BASE = {"rope_type": "default", "rope_theta": 20.0}
_NO_LLAMA = dict.fromkeys(
    (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act"),
    ),
    ABSENT,
)
_DBRX_ATTENTION = {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 10000.0}
_DBRX_EXPERTS = {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 3}
_SIGMOID = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_shared_experts": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}

_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": ABSENT,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_TWO_ROPES: dict[str, Any] = {
    "full_attention": {**LLAMA3, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 1.0},
}
_TWO_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

FURTHER: dict[str, dict[str, Any]] = {
    "afmoe": {
        "model_type": "afmoe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "route_scale": 1.5,
        "sliding_window": 24,
        "layer_types": _TWO_KINDS,
        "mup_enabled": True,
    },
    "cwm": {"model_type": "cwm", "sliding_window": 24, "layer_types": _TWO_KINDS, "rope_parameters": _PLAIN},
    "dbrx": {
        **_NO_LLAMA,
        "model_type": "dbrx",
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": _DBRX_ATTENTION,
        "ffn_config": _DBRX_EXPERTS,
        "rope_parameters": _PLAIN,
    },
    "exaone-moe": {
        **_SIGMOID,
        "model_type": "exaone_moe",
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "n_group": 3,
        "topk_group": 2,
    },
    "flex-olmo": {"model_type": "flex_olmo", "num_experts": 6, "num_experts_per_tok": 3},
    "hy-v3": {**_SIGMOID, "model_type": "hy_v3", "attention_bias": True},
    "hyperclovax": {
        "model_type": "hyperclovax",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.5,
        "logits_scaling": 1.5,
    },
    "iquestcoder": {"model_type": "iquestcoder", "attention_bias": True, "mlp_bias": True},
    "jais2": {"model_type": "jais2", "layer_norm_eps": 1e-3, "rms_norm_eps": ABSENT, "hidden_act": "relu2"},
    "mellum": {
        "model_type": "mellum",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "sliding_window": 24,
        "layer_types": _TWO_KINDS,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "rope_parameters": {"full_attention": {**_PLAIN, "rope_theta": 500.0}, "sliding_attention": _OTHER_BASE},
    },
    "solar-open": {
        "model_type": "solar_open",
        "intermediate_size": ABSENT,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
    },
    "youtu": {**_LATENT, "model_type": "youtu", "tie_word_embeddings": True},
    "stablelm-12b": {
        "model_type": "stablelm",
        "layer_norm_eps": 1e-3,
        "rms_norm_eps": ABSENT,
        "head_dim": ABSENT,
        "use_parallel_residual": True,
        "qk_layernorm": True,
        "rope_parameters": {**_PLAIN, "partial_rotary_factor": 0.25},
    },
    "step3p5": {
        "model_type": "step3p5",
        "pad_token_id": 2,
        "num_hidden_layers": 4,
        "num_sliding_attention_heads": 6,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "share_expert_dim": 40,
        "moe_router_scaling_factor": 1.5,
        "swiglu_limits": [0.0, 0.0, 0.0, 0.75],
        "swiglu_limits_shared": [1.5, 0.0, 0.0, 1.0],
        "rope_parameters": _TWO_ROPES,
    },
}

FURTHER_CHANGES: dict[str, list[dict[str, Any]]] = {
    "afmoe": [
        {"num_experts_per_tok": 2},
        {"mup_enabled": False},
        {"sliding_window": 25},
        {"layer_types": ["sliding_attention"] * 3},
        {"rope_parameters": _OTHER_BASE},
        {"rms_norm_eps": 1e-1},
    ],
    "cwm": [{"sliding_window": 25}, {"rope_parameters": _OTHER_BASE}, {"layer_types": ["full_attention"] * 3}],
    "hyperclovax": [
        {"embedding_multiplier": 1.0},
        {"attention_multiplier": 1.0},
        {"residual_multiplier": 1.0},
        {"logits_scaling": 1.0},
    ],
    "iquestcoder": [{"rms_norm_eps": 1e-1}],
    "jais2": [{"layer_norm_eps": 1e-1}, {"hidden_act": "relu"}],
    "mellum": [
        {"sliding_window": 25},
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 2},
        {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _PLAIN}},
    ],
    "solar-open": [{"routed_scaling_factor": 1.0}, {"num_experts_per_tok": 2}, {"rope_parameters": _OTHER_BASE}],
    "youtu": [{"rope_interleave": False}, {"rope_parameters": _OTHER_BASE}],
    "dbrx": [
        {"attn_config": {**_DBRX_ATTENTION, "clip_qkv": None}},
        {"attn_config": {**_DBRX_ATTENTION, "clip_qkv": 1.0}},
        {"ffn_config": {**_DBRX_EXPERTS, "moe_top_k": 2}},
        {"ffn_config": {**_DBRX_EXPERTS, "moe_normalize_expert_weights": None}},
        {"ffn_config": {**_DBRX_EXPERTS, "ffn_act_fn": {"name": "gelu"}}},
        {"rope_parameters": _OTHER_BASE, "attn_config": {**_DBRX_ATTENTION, "rope_theta": 20.0}},
    ],
    "exaone-moe": [
        {"rms_norm_eps": 1e-1},
        {"sliding_window": 25},
        {"sliding_window": None},
        {"topk_group": 3},
        {"num_experts_per_tok": 2},
        {"norm_topk_prob": False},
        {"routed_scaling_factor": 1.0},
        {"rope_parameters": _OTHER_BASE},
    ],
    "flex-olmo": [{"num_experts_per_tok": 2}, {"rms_norm_eps": 1e-1}],  # a norm follows the sum of the experts
    "hy-v3": [{"router_scaling_factor": 1.0}, {"num_experts_per_tok": 2}, {"rope_parameters": _OTHER_BASE}],
    "stablelm-12b": [{"layer_norm_eps": 1e-1}, {"rope_parameters": {**_PLAIN, "partial_rotary_factor": 1.0}}],
    "step3p5": [
        {"sliding_window": 25},
        {"num_experts_per_tok": 2},
        {"moe_router_scaling_factor": 1.0},
        {"query_pre_attn_scalar": 24},
        {"swiglu_limits": [0, 0, 0, 1.5]},
        {"swiglu_limits_shared": [1.5, 0.0, 0.0, 0.0]},
        {"swiglu_limits_shared": [None, 0.0, 0.0, 1.0]},
        {"rope_parameters": _TWO_ROPES | {"full_attention": {**_TWO_ROPES["full_attention"], "factor": 4.0}}},
        {"rope_parameters": _TWO_ROPES | {"full_attention": {**_TWO_ROPES["full_attention"], "rope_theta": 20.0}}},
        {"rope_parameters": _TWO_ROPES | {"sliding_attention": {"rope_type": "default", "rope_theta": 20.0}}},
    ],
}
