"""Published configs of decoders with experts, as repositories and documents quote them, with what they hold besides
sizes. Factors of LongRoPE are shortened to one number each."""

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
# openai/gpt-oss-20b, as a repository on GitHub holds it (EchoCog/gpt-oss-20b at 52971a1), without its weight format.
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
# Qwen/Qwen3-Coder-Next, as quoted by the tests of an engine in C++; its layer types written out.
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": 151645, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
# baidu/ERNIE-4.5-21B-A3B, as quoted by tests of MLX in Swift.
ERNIE_21B_A3B = {
    "model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560,
    "intermediate_size": 12288, "max_position_embeddings": 131072, "num_attention_heads": 20, "num_key_value_heads": 4,
    "head_dim": None, "num_hidden_layers": 28, "rms_norm_eps": 1e-05, "vocab_size": 103424, "rope_theta": 500000,
    "use_bias": False, "tie_word_embeddings": True, "moe_num_experts": 64, "moe_layer_start_index": 1,
    "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_interval": 1, "moe_num_shared_experts": 2,
    "moe_layer_end_index": None, "moe_gate_act": None,
}  # fmt: skip
# tencent/Hunyuan-A13B-Instruct, as quoted by tests of a profiler and of MLX in Swift, but for the context.
HUNYUAN_A13B = {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "hidden_size": 4096,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 128167, "torch_dtype": "bfloat16", "num_experts": 64,
    "moe_intermediate_size": [3072] * 32, "moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "rms_norm_eps": 1e-05,
    "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "use_cla": False, "use_mixed_mlp_moe": True, "use_qk_norm": True,
    "max_position_embeddings": 32768,
}  # fmt: skip
