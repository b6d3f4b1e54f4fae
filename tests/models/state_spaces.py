"""Tiny configurations of the families with Mamba layers, each with what sets it apart switched on; for `families`."""

from __future__ import annotations

from typing import Any

ABSENT = object()  # of a field in `families.SIZES` that a family does not have
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_head": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_proj_bias": True,
    "time_step_limit": [0.1, 2.0],
}
_GRANITE = {
    "model_type": "granitemoehybrid",
    "shared_intermediate_size": 24,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
_NEMOTRON = {
    "model_type": "nemotron_h",
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
    "num_hidden_layers": ABSENT,
    "rms_norm_eps": ABSENT,
    "hidden_act": ABSENT,
    "layer_norm_epsilon": 1e-3,
    "mlp_hidden_act": "relu2",
    "ssm_state_size": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "n_groups": 3,
    "conv_kernel": 3,
    "chunk_size": 16,
    "time_step_min": 1e-9,  # transformers clamps to it, the published code does not
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}
_NO_ATTENTION = dict.fromkeys(
    ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"), ABSENT
) | {"max_position_embeddings": ABSENT, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-3}
_MAMBA = {**_NO_ATTENTION, "state_size": 6, "time_step_rank": 5, "use_bias": True, "hidden_act": "gelu"}
_ZAMBA2 = {
    "model_type": "zamba2",
    "tie_word_embeddings": True,  # else transformers ties no blocks either
    "head_dim": ABSENT,
    "num_key_value_heads": 4,
    "hidden_act": "gelu",
    "mamba_d_state": 12,
    "mamba_ngroups": 2,
    "n_mamba_heads": 8,
    "chunk_size": 16,
    "time_step_min": 1e-9,
    "add_bias_linear": True,
    "adapter_rank": 5,
}
# How much more than others these models of random weights enlarge roundings. (Transformers' own logits of a Zamba2 in
# float32 and float64 differ by 2e-4 to 4e-4, and move by 1e-3 if its weights change by half a unit in the last place:
# its shared blocks have no residual. Logits of a mixture of Qwen3.5 move by 5e-6 in the same way, those of a Llama by
# 1.6e-6.)
ROUNDING = {"jamba": 10, "qwen3-5-moe": 3, "zamba2": 200, "zamba2-blocks": 200}
STATE_SPACES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA2, "model_type": "bamba", "attn_layer_indices": [1]},
    "falcon-h1": {
        **_MAMBA2,
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 96,
        "mamba_n_heads": 6,
        "mamba_rms_norm": True,
        "projectors_bias": True,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "mlp_multipliers": [0.7, 1.5],
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.9,
        "ssm_multipliers": [0.7, 1.4, 0.8, 1.2, 0.6],
    },
    "falcon-mamba": {**_MAMBA, "model_type": "falcon_mamba", "mixer_rms_eps": 1e-2},
    "jamba": {
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 6,
        "mamba_dt_rank": 5,
        "mamba_proj_bias": True,
        "use_mamba_kernels": False,
    },
    "mamba": {**_MAMBA, "model_type": "mamba"},
    "mamba2": {
        **_NO_ATTENTION,
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 12,
        "chunk_size": 16,
        "use_bias": True,
        "time_step_limit": [0.1, 2.0],
    },
    "granite-hybrid": {
        **_GRANITE,
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "position_embedding_type": "rope",
    },
    "nemotron-h": _NEMOTRON,
    "nemotron-h-latent": {**_NEMOTRON, "moe_latent_size": 32, "mlp_bias": True, "use_bias": True},
    "granite-hybrid-dense": {
        **_GRANITE,
        "layer_types": ["full_attention", "full_attention", "full_attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "mamba_n_heads": 8,
    },
    "zamba2": {
        **_ZAMBA2,
        "num_hidden_layers": 3,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid"],
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
    },
    "zamba2-blocks": {
        **_ZAMBA2,
        "num_hidden_layers": 4,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
    },
}
