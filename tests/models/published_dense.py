"""Published configs of dense decoders, as repositories and documents quote them, with what they hold besides sizes."""

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
STABLELM_2_12B = {
    "architectures": ["StableLmForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 100257, "eos_token_id": 100278,
    "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 5120, "initializer_range": 0.02,
    "intermediate_size": 13824, "layer_norm_eps": 1e-05, "max_position_embeddings": 4096, "model_type": "stablelm",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "partial_rotary_factor": 0.25,
    "qk_layernorm": True, "rope_scaling": None, "rope_theta": 10000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_parallel_residual": True, "use_qkv_bias": False,
    "vocab_size": 100352,
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
# LiquidAI/LFM2-350M and LFM2-8B-A1B, as quoted by mlxcel's tests; LFM2.5-8B-A1B, by a reference of its architecture.
LFM2_350M = {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": 65536, "hidden_size": 1024,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 128000,
    "norm_eps": 1e-05, "conv_bias": False, "conv_L_cache": 3, "rope_theta": 1000000.0, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_dim": 1024, "block_ff_dim": 6656,
}  # fmt: skip
# ByteDance-Seed/Seed-OSS-36B, as quoted by a test of MLX in Swift.
SEED_OSS_36B = {
    "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 64,
    "intermediate_size": 27648, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-06, "vocab_size": 155136, "rope_theta": 10000000.0, "rope_scaling": {"rope_type": "default"},
    "max_position_embeddings": 524288, "tie_word_embeddings": False,
}  # fmt: skip
# HuggingFaceTB/SmolLM3-3B, as quoted by a training project's module of configs.
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 65536, "model_type": "smollm3", "no_rope_layer_interval": 4,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004,
    "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 128256,
}  # fmt: skip
# allenai/Olmo-3-7B-Think, as quoted by scripts for its evaluation; its rotary embedding also by Tenstorrent's code.
OLMO_3_7B = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 65536, "model_type": "olmo3",
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
}  # fmt: skip
# CohereLabs/tiny-aya-global, as quoted by tests of MLX in Swift, with four of its layers; the last line as another
# reader expects it of all configs of Command R7B and Tiny Aya.
TINY_AYA = {
    "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 4,
    "intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "rope_theta": 50000, "vocab_size": 262144, "layer_norm_eps": 1e-05, "logit_scale": 1.0, "attention_bias": False,
    "sliding_window": 4096, "sliding_window_pattern": 4, "max_position_embeddings": 8192,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "use_parallel_block": True, "use_qk_norm": False, "rotary_pct": 1.0, "position_embedding_type": "rope_gptj",
}  # fmt: skip
