"""Tiny configurations of the llama family, each with what sets it apart switched on."""

from __future__ import annotations

from typing import Any

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
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 32,
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
}


def config_of(name: str) -> dict[str, Any]:
    return {**SIZES, **FAMILIES[name]}
