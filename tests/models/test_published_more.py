"""Published configs of further decoders, as public repositories quote them in tests and documents, and what decides."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.models.registry import model_class_for

# LiquidAI/LFM2-350M and LFM2-8B-A1B, as quoted by mlxcel's tests; LFM2.5-8B-A1B, by a reference of its architecture.
LFM2_350M = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": 65536, "hidden_size": 1024,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 128000,
    "norm_eps": 1e-05, "conv_bias": False, "conv_L_cache": 3, "rope_theta": 1000000.0, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_dim": 1024, "block_ff_dim": 6656,
}  # fmt: skip
LFM2_8B_A1B = {
    "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"], "vocab_size": 65536, "hidden_size": 2048,
    "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-05, "conv_bias": False,
    "conv_L_cache": 3, "rope_theta": 1000000.0, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0, "eos_token_id": 7,
    "layer_types": [
        *["conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "conv"],
        *["full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention"],
        *["conv", "conv", "full_attention", "conv", "conv"],
    ],
}  # fmt: skip
LFM2_5_8B_A1B = {
    **{name: value for name, value in LFM2_8B_A1B.items() if name != "rope_theta"}, "vocab_size": 128000,
    "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 5000000, "rope_type": "default"},
}  # fmt: skip
# zai-org/GLM-4.5-Air, as quoted by a script that converts its checkpoint.
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
    "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
    "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000,
    "router_aux_loss_coef": 0.001, "tie_word_embeddings": False, "topk_method": "noaux_tc", "use_cache": True,
    "vocab_size": 151552,
}  # fmt: skip
# MiniMaxAI/MiniMax-M2.5, as quoted by a test of hooks into vLLM.
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
    "head_dim": 128, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8,
    "shared_intermediate_size": 0, "scoring_func": "sigmoid", "use_routing_bias": True, "output_router_logits": False,
    "use_qk_norm": True, "qk_norm_type": "per_layer", "max_position_embeddings": 204800, "vocab_size": 200064,
    "rms_norm_eps": 1e-6, "attention_dropout": 0.0, "router_jitter_noise": 0.0, "num_mtp_modules": 3,
    "mtp_transformer_layers": 1, "use_mtp": True, "attention_bias": False, "tie_word_embeddings": False,
    "attn_type_list": [1] * 62, "rope_theta": 5000000,
}  # fmt: skip
# ByteDance-Seed/Seed-OSS-36B, as quoted by a test of MLX in Swift.
SEED_OSS_36B = {
    "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 64,
    "intermediate_size": 27648, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-06, "vocab_size": 155136, "rope_theta": 10000000.0, "rope_scaling": {"rope_type": "default"},
    "max_position_embeddings": 524288, "tie_word_embeddings": False,
}  # fmt: skip
# LGAI-EXAONE/K-EXAONE-236B-A23B at 48 layers, as quoted at 4 by TensorRT-LLM's tests.
K_EXAONE = {
    "architectures": ["ExaoneMoEForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16",
    "eos_token_id": 53, "first_last_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
    "initializer_range": 0.02, "intermediate_size": 18432, "is_moe_layer": [False] + [True] * 47,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 262144, "model_type": "exaone_moe", "moe_intermediate_size": 2048, "n_group": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 8, "num_shared_experts": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer", "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True,
    "vocab_size": 153600,
}  # fmt: skip
# arcee-ai/Trinity-Nano-Preview, as quoted by the tests of neuronx-distributed-inference.
TRINITY_NANO = {
    "architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "dtype": "bfloat16",
    "auto_map": {"AutoConfig": "configuration_afmoe.AfmoeConfig", "AutoModel": "modeling_afmoe.AfmoeModel"},
    "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 131072, "model_type": "afmoe",
    "moe_intermediate_size": 256, "mup_enabled": True, "n_group": 1, "num_attention_heads": 8, "num_dense_layers": 2,
    "num_expert_groups": 1, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 56,
    "num_key_value_heads": 2, "num_limited_groups": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000, "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid",
    "sliding_window": 2048, "tie_word_embeddings": False, "topk_group": 1, "transformers_version": "4.57.3",
    "use_cache": True, "use_grouped_mm": True, "vocab_size": 200192,
}  # fmt: skip
# layers, width, heads, heads of keys, width of a head, context
SIZES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "LFM2-350M": (LFM2_350M, (16, 1024, 16, 8, 64, 128000)),
    "LFM2-8B-A1B": (LFM2_8B_A1B, (24, 2048, 32, 8, 64, 128000)),
    "LFM2.5-8B-A1B": (LFM2_5_8B_A1B, (24, 2048, 32, 8, 64, 128000)),
    "GLM-4.5-Air": (GLM_4_5_AIR, (46, 4096, 96, 8, 128, 131072)),
    "MiniMax-M2.5": (MINIMAX_M2, (62, 3072, 48, 8, 128, 204800)),
    "Seed-OSS-36B": (SEED_OSS_36B, (64, 5120, 80, 8, 128, 524288)),
    "K-EXAONE-236B": (K_EXAONE, (48, 6144, 64, 8, 128, 262144)),
    "Trinity-Nano": (TRINITY_NANO, (56, 1024, 8, 2, 128, 131072)),
}


def read(config: dict[str, Any]) -> Any:
    return model_class_for(config).Config.from_hf(config)


@pytest.mark.parametrize("name", SIZES)
def test_a_published_config_is_accepted(name):
    config, sizes = SIZES[name]
    c = read(config)
    assert (c.num_layers, c.width, c.heads, c.kv_heads, c.head_dim, c.context_length) == sizes


def test_the_details_that_decide():
    assert read(MINIMAX_M2).rotary_dim == 64 and read(GLM_4_5_AIR).rotary_dim == 64
    assert read(K_EXAONE).windows == (128, 128, 128, 0) * 12 and read(K_EXAONE).rope_theta == 1e6
    assert read(LFM2_5_8B_A1B).rope_theta == 5e6 and read(LFM2_8B_A1B).rope_theta == 1e6
    nano = read(TRINITY_NANO)
    assert nano.rotates == (True, True, True, False) * 14 and nano.windows == (2048, 2048, 2048, 0) * 14
