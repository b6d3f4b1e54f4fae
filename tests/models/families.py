"""Tiny configurations of the decoders, each with what sets it apart switched on."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tests.models.state_spaces import ABSENT, STATE_SPACES

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
_RECURRENT = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
QWEN3_NEXT = {
    **QWEN3_MOE,
    **_RECURRENT,
    "model_type": "qwen3_next",
    "mlp_only_layers": [2],
    "shared_expert_intermediate_size": 24,
}
QWEN3_5 = {
    **_RECURRENT,
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
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biased-tied": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "head_dim": 24,
        "num_key_value_heads": 4,
    },
    "llama-3": {"model_type": "llama", "rope_theta": 500.0, "rope_scaling": LLAMA3},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "mistral": {"model_type": "mistral", "sliding_window": 24, "num_key_value_heads": 1},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000.0, "tie_word_embeddings": True},
    "qwen2-windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "qwen2-yarn": {"model_type": "qwen2", "rope_theta": 100.0, "rope_scaling": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "hidden_size": 48, "num_attention_heads": 6},
    "gemma2": {**GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 4.0, "final_logit_softcapping": 20.0},
    "gemma3": {
        **GEMMA,
        "model_type": "gemma3_text",
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
        },
    },
    "gemma4": {
        **GEMMA4,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4-moe": {
        **GEMMA4,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "attention_bias": True,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 24,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 24, **PARTIAL},
    "phi3-longrope": {
        "model_type": "phi3",
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "rope_parameters": LONGROPE,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24},
    "qwen3-moe": {**QWEN3_MOE, "norm_topk_prob": True},
    "qwen3-next": QWEN3_NEXT,
    "qwen3-5": QWEN3_5,
    "qwen3-5-moe": QWEN3_5_MOE,
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 100.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "seed-oss": {"model_type": "seed_oss", "attention_out_bias": True},
    "arcee": {"model_type": "arcee", "hidden_act": "relu2"},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "exaone4": {"model_type": "exaone4", "sliding_window": 24, "sliding_window_pattern": 2},
    "glm4": {"model_type": "glm4", "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    "ernie4-5": {"model_type": "ernie4_5", "use_bias": True, "num_key_value_heads": 1},
    "cohere2": {
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_norm_eps": 1e-3,
        "rms_norm_eps": ABSENT,
        "logit_scale": 0.5,
        "tie_word_embeddings": True,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "norm_epsilon": 1e-3,
        "rms_norm_eps": ABSENT,
        "sliding_window": 24,
        "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "nemotron": {
        "model_type": "nemotron",
        "norm_eps": 1e-3,
        "rms_norm_eps": ABSENT,
        "hidden_act": "relu2",
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "gpt-neox": {
        "model_type": "gpt_neox",
        "num_key_value_heads": 4,
        "layer_norm_eps": 1e-3,
        "rms_norm_eps": ABSENT,
        "hidden_act": "gelu",
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25},
    },
    "stablelm": {
        "model_type": "stablelm",
        "layer_norm_eps": 1e-3,
        "rms_norm_eps": ABSENT,
        "use_qkv_bias": True,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25},
    },
    "qwen2-moe": {
        **QWEN3_MOE,
        "model_type": "qwen2_moe",
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 24,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 100.0},
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5, "rope_theta": 100.0},
    },
    "glm4-moe": {**DEEPSEEK_MOE, "model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": True},
    "dots1": {**DEEPSEEK_MOE, "model_type": "dots1", "sliding_window": 24, "max_window_layers": 2},
    "deepseek-v2": {
        **DEEPSEEK_MOE,
        **LATENT,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "deepseek-v2-lite": {
        **DEEPSEEK_MOE,
        **LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "norm_topk_prob": False,
    },
    "deepseek-v3": {**DEEPSEEK_MOE, **LATENT, "model_type": "deepseek_v3"},
    "glm4-moe-lite": {
        **DEEPSEEK_MOE,
        **LATENT,
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "mistral4": {
        **DEEPSEEK_MOE,
        **LATENT,
        "model_type": "mistral4",
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {**LATENT["rope_parameters"], "llama_4_scaling_beta": 0.5},
    },
    "mimo-v2-flash": {
        **{key: DEEPSEEK_MOE[key] for key in DEEPSEEK_MOE.keys() - {"n_shared_experts", "first_k_dense_replace"}},
        "model_type": "mimo_v2_flash",
        "head_dim": 24,
        "v_head_dim": 16,
        "num_key_value_heads": 1,
        "sliding_window": 25,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.334},
        },
    },
    "minicpm3": {**LATENT, "model_type": "minicpm3", "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32},
    "minimax-m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "ernie4-5-moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
    },
    "hunyuan-moe": {"model_type": "hunyuan_v1_moe", "num_experts": 6, "moe_topk": 3},
    "granite-moe": {
        "model_type": "granitemoeshared",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 24,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.5,
        "logits_scaling": 4.0,
    },
    "lfm2": {**LFM2, "model_type": "lfm2", "block_multiple_of": 32},
    "lfm2-moe": {
        **LFM2,
        "model_type": "lfm2_moe",
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    },
    "olmo-hybrid": {
        **_RECURRENT,
        "model_type": "olmo_hybrid",
        "head_dim": ABSENT,
        "rope_parameters": {**PLAIN, "rope_theta": 100.0},
    },
    **STATE_SPACES,
    "apertus": {"model_type": "apertus", "hidden_act": "xielu", "rope_theta": 500.0, "rope_scaling": LLAMA3},
    "cohere": {
        "model_type": "cohere",
        "layer_norm_eps": 1e-3,
        "rms_norm_eps": ABSENT,
        "logit_scale": 0.5,
        "use_qk_norm": True,
        "head_dim": ABSENT,
        "tie_word_embeddings": True,
    },
    "falcon": {
        "model_type": "falcon",
        "layer_norm_epsilon": 1e-3,
        "rms_norm_eps": ABSENT,
        "hidden_act": ABSENT,
        "intermediate_size": ABSENT,
        "num_key_value_heads": ABSENT,
        "head_dim": ABSENT,
        "ffn_hidden_size": 112,
        "bias": True,
    },
    "falcon-grouped": {
        "model_type": "falcon",
        "layer_norm_epsilon": 1e-3,
        "rms_norm_eps": ABSENT,
        "hidden_act": ABSENT,
        "intermediate_size": ABSENT,
        "num_key_value_heads": ABSENT,
        "head_dim": ABSENT,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "tie_word_embeddings": True,
    },
    "gemma": {"model_type": "gemma", "head_dim": 32, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "glm": {"model_type": "glm", "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
    "olmo": {"model_type": "olmo", "clip_qkv": 2.0, "rms_norm_eps": ABSENT, "head_dim": ABSENT},
    "phi": {
        "model_type": "phi",
        "layer_norm_eps": 1e-3,
        "rms_norm_eps": ABSENT,
        "hidden_act": "gelu_new",
        "head_dim": ABSENT,
        "qk_layernorm": True,
        "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
    },
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.2,
        "attention_bias": True,
        "lm_head_bias": True,
        "head_dim": ABSENT,
        "rope_parameters": {
            **LONGROPE,
            "short_mscale": 1.2,
            "long_mscale": 1.4,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen3-moe-mixed": {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
}

# Families that are a Llama with other settings.
SWITCHED = (
    *("olmo2", "olmo3", "smollm3", "seed-oss", "arcee", "granite", "exaone4", "glm4", "ernie4-5", "cohere2"),
    *("starcoder2", "nemotron", "gpt-neox", "stablelm", "qwen2-moe", "olmoe", "hunyuan", "gpt-oss"),
    *("lfm2", "lfm2-moe", "olmo-hybrid"),
    *("apertus", "cohere", "falcon", "falcon-grouped", "gemma", "glm", "olmo", "phi", "phimoe"),
    *("ministral3", "glm4-moe", "dots1", "minimax-m2", "ernie4-5-moe", "hunyuan-moe", "granite-moe"),
    *STATE_SPACES,
    *("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite", "mistral4", "minicpm3"),
    "mimo-v2-flash",
    *("gemma4", "gemma4-moe"),
)


def config_of(name: str) -> dict[str, Any]:
    """A copy, for transformers writes into what it is given."""
    whole = {**SIZES, **FAMILIES[name]}
    return deepcopy({field: value for field, value in whole.items() if value is not ABSENT})
