"""Tiny configurations of the families with Mamba layers, each with what sets it apart switched on; for `families`."""

from __future__ import annotations

from typing import Any

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
STATE_SPACES: dict[str, dict[str, Any]] = {
    "granite-hybrid": {
        **_GRANITE,
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "position_embedding_type": "rope",
    },
    "granite-hybrid-dense": {
        **_GRANITE,
        "layer_types": ["full_attention", "full_attention", "full_attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "mamba_n_heads": 8,
    },
}
