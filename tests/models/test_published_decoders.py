"""Published configs of decoders, with what they hold besides sizes: each is accepted at its stated sizes. Factors of
LongRoPE are shortened to one number each."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.errors import UnsupportedModel
from kvasir.models.registry import model_class_for

PHI_3_5_MOE = {
    "architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 32000, "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02,
    "input_jitter_noise": 0.01, "intermediate_size": 6400, "lm_head_bias": True, "max_position_embeddings": 131072,
    "model_type": "phimoe", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 16, "original_max_position_embeddings": 4096,
    "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "router_aux_loss_coef": 0.0,
    "rope_scaling": {
        "long_factor": [1.08] * 64, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64, "short_mscale": 1.243163121016122, "type": "longrope",
    },
    "router_jitter_noise": 0.01, "sliding_window": 131072, "tie_word_embeddings": False, "vocab_size": 32064,
}  # fmt: skip
FALCON_7B = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
    "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",
    "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
    "parallel_attn": True, "use_cache": True, "vocab_size": 65024,
}  # fmt: skip
FALCON_40B = {
    **FALCON_7B, "hidden_size": 8192, "new_decoder_architecture": True, "num_attention_heads": 128,
    "num_hidden_layers": 60, "num_kv_heads": 8,
}  # fmt: skip
APERTUS_8B = {
    "architectures": ["ApertusForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 68, "hidden_act": "xielu", "hidden_dropout": 0.0, "hidden_size": 4096, "intermediate_size": 21504,
    "max_position_embeddings": 65536, "mlp_bias": False, "model_type": "apertus", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 3, "post_norm": False, "qk_norm": True,
    "rms_norm_eps": 1e-05, "rope_theta": 12000000, "tie_word_embeddings": False, "vocab_size": 131072,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3", "type": "llama3",
    },
}  # fmt: skip
BITNET_2B = {
    "architectures": ["BitNetForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "relu2", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 6912, "max_position_embeddings": 4096, "model_type": "bitnet", "num_attention_heads": 20,
    "num_hidden_layers": 30, "num_key_value_heads": 5, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1},
    "text_config": {
        "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
        "attention_dropout": 0.0, "attn_scale": 0.1, "attn_temperature_tuning": 4, "bos_token_id": 200000,
        "cache_implementation": "hybrid", "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192,
        "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "model_type": "llama4_text",
        "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "use_cache": True, "use_qk_norm": True, "vocab_size": 202048,
    },
}  # fmt: skip
COMMAND_R = {
    "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
    "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02,
    "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192,
    "model_max_length": 131072, "model_type": "cohere", "num_attention_heads": 64, "num_hidden_layers": 40,
    "num_key_value_heads": 64, "pad_token_id": 0, "rope_theta": 8000000.0, "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings": 8192,
    "model_type": "gemma", "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000,
}  # fmt: skip
PHI_2 = {
    "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
    "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4,
    "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "vocab_size": 51200,
}  # fmt: skip
OLMO_1B = {
    "architectures": ["OlmoForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
    "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 2048, "model_type": "olmo", "num_attention_heads": 16,
    "num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 1, "pretraining_tp": 1, "rope_scaling": None,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 50304,
}  # fmt: skip
GLM_4_9B = {
    "architectures": ["GlmForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 131072, "model_type": "glm",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 5000000.0, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 151552,
}  # fmt: skip
# layers, width, heads, heads of keys, width of a head, context
SIZES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Phi-3.5-MoE": (PHI_3_5_MOE, (32, 4096, 32, 8, 128, 131072)),
    "falcon-7b": (FALCON_7B, (32, 4544, 71, 1, 64, 2048)),
    "falcon-40b": (FALCON_40B, (60, 8192, 128, 8, 64, 2048)),
    "Apertus-8B": (APERTUS_8B, (32, 4096, 32, 8, 128, 65536)),
    "BitNet-2B-4T": (BITNET_2B, (30, 2560, 20, 5, 128, 4096)),
    "Llama-4-Scout": (LLAMA_4_SCOUT, (48, 5120, 40, 8, 128, 10485760)),
    "command-r": (COMMAND_R, (40, 8192, 64, 64, 128, 131072)),
    "gemma-2b": (GEMMA_2B, (18, 2048, 8, 1, 256, 8192)),
    "phi-2": (PHI_2, (32, 2560, 32, 32, 80, 2048)),
    "OLMo-1B": (OLMO_1B, (16, 2048, 16, 16, 128, 2048)),
    "glm-4-9b": (GLM_4_9B, (40, 4096, 32, 2, 128, 131072)),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_published_config_is_accepted(name):
    config, sizes = SIZES[name]
    c = model_class_for(config).Config.from_hf(config)
    assert (c.num_layers, c.width, c.heads, c.kv_heads, c.head_dim, c.context_length) == sizes


def test_the_details_that_decide():
    scout = model_class_for(LLAMA_4_SCOUT).Config.from_hf(LLAMA_4_SCOUT)
    assert scout.rotates == (True, True, True, False) * 12 and scout.chunks == (8192, 8192, 8192, 0) * 12
    assert scout.growth == (0.1, 8192, 1) and all(scout.sparse) and (scout.expert_inner, scout.inner) == (8192, 16384)
    moe = model_class_for(PHI_3_5_MOE).Config.from_hf(PHI_3_5_MOE)
    assert set(moe.windows) == {0} and moe.rope_scaling.served(131072).attention_factor == 1.243163121016122
    assert model_class_for(PHI_2).Config.from_hf(PHI_2).rotary_dim == 32
    assert model_class_for(GEMMA_2B).Config.from_hf(GEMMA_2B).act == "gelu_pytorch_tanh"


def test_alibi_is_refused_by_name():
    rw = {**FALCON_7B, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    with pytest.raises(UnsupportedModel, match="alibi"):
        model_class_for(rw).Config.from_hf(rw)
