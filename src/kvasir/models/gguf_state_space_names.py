"""The tensors' names in GGUF files of models with Mamba layers and of RWKV-7, and what they are in the checkpoint."""

from __future__ import annotations


def _mamba(mixer: str) -> dict[str, str]:
    parts = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
        "ssm_dt": "dt_bias",
    }
    return {name: f"{mixer}.{part}" for name, part in parts.items()}


def _mamba1(mixer: str) -> dict[str, str]:
    return {
        **{name: part for name, part in _mamba(mixer).items() if name != "ssm_norm"},
        "ssm_x": f"{mixer}.x_proj",
        "ssm_dt": f"{mixer}.dt_proj",
        **{f"ssm_{part}_norm": f"{mixer}.{part}_layernorm" for part in ("dt", "b", "c")},
    }


def _attention(prefix: str) -> dict[str, str]:
    return {f"attn_{part}": f"{prefix}.{part}_proj" for part in "qkv"} | {"attn_output": f"{prefix}.o_proj"}


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_FEED_FORWARD = {f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
_SHARED = {"gate": "shared_mlp.gate_proj", "up": "shared_mlp.up_proj", "down": "shared_mlp.output_linear"}
GRANITE_HYBRID = {
    **_OUTER,
    **_attention("self_attn"),
    **_mamba("mamba"),
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{part}_exps": f"block_sparse_moe.experts.*.{part}_proj" for part in _SHARED},
    **{f"ffn_{part}_shexp": name for part, name in _SHARED.items()},
    **{f"ffn_{part}": name for part, name in _SHARED.items()},
}
NEMOTRON_H = {
    **_BACKBONE,
    **_attention("mixer"),
    **_mamba("mixer"),
    "attn_norm": "norm",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_exps": f"mixer.experts.*.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
}
FALCON_H1 = {
    **_OUTER,
    **_attention("self_attn"),
    **_mamba("mamba"),
    **_FEED_FORWARD,
    "output_norm": "model.final_layernorm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm",
}
JAMBA = {
    **_OUTER,
    **_attention("self_attn"),
    **_mamba1("mamba"),
    **_FEED_FORWARD,
    "output_norm": "model.final_layernorm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{part}_exps": f"feed_forward.experts.*.{part}_proj" for part in ("gate", "up", "down")},
}
MAMBA = {**_BACKBONE, **_mamba1("mixer"), "attn_norm": "norm"}
MAMBA2 = {**_BACKBONE, **_mamba("mixer"), "attn_norm": "norm"}
# What Mamba 2 stores in more dimensions than the checkpoint.
FLAT = ("ssm_a", "ssm_d", "ssm_norm")
_RANKS = ("w", "a", "v", "g")  # of the decay, the rate, the first layer's values, the gate
RWKV7 = {
    "token_embd": "model.embeddings",
    "token_embd_norm": "model.layers.0.pre_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "time_mix_lerp_fused": "attn.x_*",
    **{f"time_mix_{part}": f"attn.{part}" for part in ("k_k", "k_a", "r_k")},
    **{f"time_mix_{part}0": f"attn.{part}_lora.lora.2.bias" for part in _RANKS},
    **{f"time_mix_{part}1": f"attn.{part}_lora.lora.0" for part in _RANKS},
    **{f"time_mix_{part}2": f"attn.{part}_lora.lora.2" for part in _RANKS},
    "time_mix_receptance": "attn.r_proj",
    "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_output": "attn.o_proj",
    "time_mix_ln": "attn.g_norm",
    "channel_mix_lerp_k": "ffn.x_k",
    "channel_mix_key": "ffn.key",
    "channel_mix_value": "ffn.value",
}
# Vectors of these are tensors of their own in the checkpoint, whose names have no ".weight".
RWKV7_VECTORS = (
    *("time_mix_lerp_fused", "time_mix_k_k", "time_mix_k_a", "time_mix_r_k", "channel_mix_lerp_k"),
    *(f"time_mix_{part}0" for part in _RANKS),
)
RWKV7_STACKS = {"time_mix_lerp_fused": "rwkvag"}
