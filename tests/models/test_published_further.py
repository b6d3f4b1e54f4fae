"""Published configs of further decoders, with what they hold besides sizes: each is accepted at its stated sizes."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.errors import KvasirError
from kvasir.models.registry import model_class_for

DBRX = {
    "architectures": ["DbrxForCausalLM"], "d_model": 6144, "emb_pdrop": 0.0, "initializer_range": 0.02,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
    "ffn_config": {
        "ffn_hidden_size": 10752, "model_type": "", "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05,
        "moe_num_experts": 16, "moe_top_k": 4,
    },
    "max_seq_len": 32768, "model_type": "dbrx", "n_heads": 48, "n_layers": 40, "output_router_logits": False,
    "resid_pdrop": 0.0, "router_aux_loss_coef": 0.05, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
STABLELM_2_12B = {
    "architectures": ["StableLmForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 100257, "eos_token_id": 100278,
    "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 13824, "layer_norm_eps": 1e-05, "max_position_embeddings": 4096, "model_type": "stablelm",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "partial_rotary_factor": 0.25,
    "qk_layernorm": True, "rope_scaling": None, "rope_theta": 10000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_parallel_residual": True, "use_qkv_bias": False,
    "vocab_size": 100352,
}  # fmt: skip
K_EXAONE = {
    "architectures": ["ExaoneMoEForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 53,
    "first_last_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
    "initializer_range": 0.02, "intermediate_size": 18432, "is_moe_layer": [False] + [True] * 47,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12, "max_position_embeddings": 262144,
    "model_type": "exaone_moe", "moe_intermediate_size": 2048, "mtp_loss_scaling_factor": 0.05,
    "mtp_share_layers": False, "n_group": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "num_shared_experts": 1, "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True, "vocab_size": 153600,
}  # fmt: skip
FLEX_OLMO = {
    "architectures": ["FlexOlmoForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "flex_olmo", "norm_topk_prob": False,
    "num_attention_heads": 32, "num_experts": 7, "num_experts_per_tok": 7, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "output_router_logits": False, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 500000, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
TRINITY_MINI = {
    "architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "global_attn_every_n_layers": 4, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "load_balance_coeff": 0.001,
    "max_position_embeddings": 131072, "model_type": "afmoe", "moe_intermediate_size": 1024, "mup_enabled": True,
    "n_group": 1, "num_attention_heads": 32, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 4, "num_limited_groups": 1,
    "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000, "route_norm": True,
    "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048, "tie_word_embeddings": False,
    "topk_group": 1, "use_cache": True, "use_grouped_mm": True, "vocab_size": 200192,
}  # fmt: skip
CWM = {
    "architectures": ["CwmForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
    "initializer_range": 0.02, "intermediate_size": 21504,
    "layer_types": ["sliding_attention" if i % 4 else "full_attention" for i in range(64)],
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "cwm", "num_attention_heads": 48,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000.0, "sliding_window": 8192, "tie_word_embeddings": False, "use_cache": True,
    "vocab_size": 128256,
}  # fmt: skip
# layers, width, heads, heads of keys, width of a head, context
SIZES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "dbrx": (DBRX, (40, 6144, 48, 8, 128, 32768)),
    "stablelm-2-12b": (STABLELM_2_12B, (40, 5120, 32, 8, 160, 4096)),
    "K-EXAONE-236B": (K_EXAONE, (48, 6144, 64, 8, 128, 262144)),
    "Trinity-Mini": (TRINITY_MINI, (32, 2048, 32, 4, 128, 131072)),
    "cwm": (CWM, (64, 6144, 48, 8, 128, 131072)),
    "FlexOlmo-7x7B": (FLEX_OLMO, (32, 4096, 32, 32, 128, 4096)),
}


def read(config: dict[str, Any]) -> Any:
    return model_class_for(config).Config.from_hf(config)


@pytest.mark.parametrize("name", SIZES)
def test_a_published_config_is_accepted(name):
    config, sizes = SIZES[name]
    c = read(config)
    assert (c.num_layers, c.width, c.heads, c.kv_heads, c.head_dim, c.context_length) == sizes


def test_the_details_that_decide():
    dbrx = read(DBRX)
    assert (dbrx.rope_theta, dbrx.qkv_clip, dbrx.num_experts, dbrx.routing.top_k) == (500000.0, 8.0, 16, 4)
    trinity = read(TRINITY_MINI)
    assert trinity.rotates == (True, True, True, False) * 8 and trinity.embed_scale == 2048**0.5
    assert trinity.sparse == (False, False) + (True,) * 30 and trinity.shared_inner == 1024
    exaone = read(K_EXAONE)
    assert exaone.windows == (128, 128, 128, 0) * 12 and exaone.rotates == (True, True, True, False) * 12
    assert exaone.sparse == (False,) + (True,) * 47 and exaone.routing.scale == 2.5
    assert read(STABLELM_2_12B).rotary_dim == 40


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**DBRX, "rope_parameters": {"rope_theta": 10000.0}}, "rope_theta"),
        ({**DBRX, "ffn_config": {**DBRX["ffn_config"], "moe_top_k": 17}}, "moe_top_k"),
        ({**DBRX, "ffn_config": {**DBRX["ffn_config"], "moe_normalize_expert_weights": 2}}, "moe_normalize"),
        ({**DBRX, "ffn_config": {**DBRX["ffn_config"], "ffn_act_fn": {"name": "mish"}}}, "ffn_act_fn"),
        ({**DBRX, "attn_config": 3}, "attn_config"),
        ({**DBRX, "attn_config": {"new_scale": 2.0}}, "new_scale"),
        ({**K_EXAONE, "is_moe_layer": [True]}, "is_moe_layer"),
        ({**TRINITY_MINI, "num_expert_groups": 2}, "num_expert_groups"),
        ({**TRINITY_MINI, "score_func": "softmax"}, "score_func"),
    ],
)
def test_values_without_code_are_refused_by_name(config, words):
    with pytest.raises(KvasirError, match=words):
        read(config)
