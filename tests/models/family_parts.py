"""Settings that the tiny configurations of several families share."""

from __future__ import annotations

from typing import Any

from tests.models.state_spaces import ABSENT

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 32,
}
# The last quarter of a head's dimensions does not turn.
PARTIAL = {"partial_rotary_factor": 0.75, "rope_theta": 100.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.2, 2.0, 1.5, 2.5, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 48.0, 64.0],
    "rope_theta": 100.0,
}
GEMMA = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "sliding_window": 24,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": ABSENT,
    "vocab_size_per_layer_input": 96,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 500.0, "factor": 2.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
    "tie_word_embeddings": True,
    "final_logit_softcapping": 50.0,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
LATENT = {
    "num_key_value_heads": 4,
    "head_dim": ABSENT,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_parameters": {**YARN, "rope_theta": 100.0, "mscale": 0.7, "mscale_all_dim": 0.5},
}
INDEXER = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 8}
RECURRENT = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
QWEN3_NEXT = {
    **QWEN3_MOE,
    **RECURRENT,
    "model_type": "qwen3_next",
    "mlp_only_layers": [2],
    "shared_expert_intermediate_size": 24,
}
QWEN3_5 = {
    **RECURRENT,
    "model_type": "qwen3_5_text",
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip
QWEN3_5_MOE = {
    **QWEN3_5,
    **{key: QWEN3_MOE[key] for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")},
    "model_type": "qwen3_5_moe_text",
    "shared_expert_intermediate_size": 24,
}

DEEPSEEK_MOE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "rms_norm_eps": ABSENT,
    "norm_eps": 1e-3,
    "conv_bias": True,
    "conv_L_cache": 4,
    "tie_word_embeddings": True,
    "hidden_act": ABSENT,
}
