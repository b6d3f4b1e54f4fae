"""Converts the metadata of GGUF files of decoders whose settings differ from Llama's to the `config.json` that our
classes read.

What a file does not say is what llama.cpp assumes for the architecture: its converters and `llama-model.cpp`.
"""

from __future__ import annotations

from typing import Any

from kvasir.models.config import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields
from kvasir.models.gguf_fields import (
    Shapes,
    read_decoder,
    read_expert_counts,
    read_layer_types,
    read_routed_experts,
)

Config = dict[str, Any]
_SIGMOID = 2  # llama.cpp's number of the gating function


def _biased(shapes: Shapes, module: str) -> bool:
    return any(name.endswith(f".{module}.bias") for name in shapes)


def _window(f: Fields, default: int = 0) -> int:
    return f.integer("attention.sliding_window", 0, MAX_POSITIONS, default)


def _olmo2(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """An Olmo 3 if the file has a window. Its layers with a window rotate without scaling."""
    config = read_decoder(f, shapes)
    if not (window := _window(f)):
        return config | {"model_type": "olmo2"}
    plain = {"rope_theta": config.pop("rope_theta")}
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    return config | {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": read_layer_types(f, config["num_hidden_layers"], pattern=4),
        "rope_parameters": {
            "full_attention": {**scaling, **plain},
            "sliding_attention": {"rope_type": "default", **plain},
        },
    }


def _smollm3(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes) | {
        "model_type": "smollm3",
        "attention_bias": _biased(shapes, "attn_q"),
        "mlp_bias": _biased(shapes, "ffn_up"),
    }


def _seed_oss(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes) | {
        "model_type": "seed_oss",
        "attention_bias": _biased(shapes, "attn_q"),
        "attention_out_bias": _biased(shapes, "attn_output"),
        "mlp_bias": _biased(shapes, "ffn_up"),
    }


def _arcee(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes) | {
        "model_type": "arcee",
        "attention_bias": _biased(shapes, "attn_q"),
        "mlp_bias": _biased(shapes, "ffn_up"),
    }


def _granite(f: Fields, architecture: str, shapes: Shapes) -> Config:
    scales = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    config = read_decoder(f, shapes) | {name: f.number(key, 0.0, 1e6, 1.0) for name, key in scales.items()}
    config["attention_bias"] = _biased(shapes, "attn_q")
    if architecture == "granite":
        return config | {"model_type": "granite", "mlp_bias": _biased(shapes, "ffn_up")}
    shared = f.integer("expert_shared_feed_forward_length", 0, MAX_WIDTH, 0)
    kind = "granitemoeshared" if shared else "granitemoe"
    return config | {"model_type": kind, "shared_intermediate_size": shared} | read_expert_counts(f)


def _exaone4(f: Fields, architecture: str, shapes: Shapes) -> Config:
    config, window = read_decoder(f, shapes), _window(f)
    config |= {"model_type": "exaone4", "sliding_window": window or None}
    if not window:
        return config
    types = read_layer_types(f, config["num_hidden_layers"], pattern=4)
    return config | {"layer_types": types}


def _glm4(f: Fields, architecture: str, shapes: Shapes) -> Config:
    f.expect("nextn_predict_layers", 0)
    config = read_decoder(f, shapes, partial=True)
    return config | {"model_type": "glm4", "attention_bias": _biased(shapes, "attn_q")}


def _ernie(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes) | {"model_type": "ernie4_5", "use_bias": _biased(shapes, "attn_q")}


def _cohere2(f: Fields, architecture: str, shapes: Shapes) -> Config:
    config = read_decoder(f, shapes, eps="layer_norm_eps")
    return config | {
        "model_type": "cohere2",
        "sliding_window": _window(f, 4096),
        "layer_types": read_layer_types(f, config["num_hidden_layers"], pattern=4),
        "logit_scale": f.number("logit_scale", 1e-6, 1e6, 0.0625),
        "attention_bias": _biased(shapes, "attn_q"),
    }


def _starcoder2(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """The file does not hold the window of the config that it was made from."""
    return read_decoder(f, shapes, eps="norm_epsilon") | {
        "model_type": "starcoder2",
        "sliding_window": None,
        "use_bias": _biased(shapes, "attn_q"),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _nemotron(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes, eps="norm_eps", partial=True) | {
        "model_type": "nemotron",
        "attention_bias": _biased(shapes, "attn_q"),
        "mlp_bias": _biased(shapes, "ffn_up"),
    }


def _gpt_neox(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes, eps="layer_norm_eps", partial=True) | {
        "model_type": "gpt_neox",
        "use_parallel_residual": f.flag("use_parallel_residual", True),
        "attention_bias": _biased(shapes, "attn_qkv"),
    }


def _stablelm(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes, eps="layer_norm_eps", partial=True) | {
        "model_type": "stablelm",
        "use_parallel_residual": f.flag("use_parallel_residual", "blk.0.ffn_norm.weight" not in shapes),
        "use_qkv_bias": _biased(shapes, "attn_q"),
        "qk_layernorm": "blk.0.attn_q_norm.weight" in shapes,
    }


def _hunyuan_dense(f: Fields, architecture: str, shapes: Shapes) -> Config:
    f.get("rope.scaling.original_context_length")  # the base already contains the scaling
    return read_decoder(f, shapes) | {"model_type": "hunyuan_v1_dense", "attention_bias": _biased(shapes, "attn_q")}


# --- experts ----------------------------------------------------------------------------------------


def _gpt_oss(f: Fields, architecture: str, shapes: Shapes) -> Config:
    config = read_decoder(f, shapes) | {"model_type": "gpt_oss", **read_expert_counts(f)}
    config["intermediate_size"] = f.integer("expert_feed_forward_length", 1, MAX_WIDTH, config["intermediate_size"])
    config["sliding_window"] = _window(f, 128)
    layers = range(config["num_hidden_layers"])
    config["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    config["attention_bias"] = _biased(shapes, "attn_q")
    if config["rope_scaling"]:  # llama.cpp rounds the bounds of YaRN's ramp, which the model's own code does not
        config["rope_scaling"] |= {"truncate": False}
    return config


def _qwen2moe(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes) | read_routed_experts(f, normalise=False) | {
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": f.integer("expert_shared_feed_forward_length", 1, MAX_WIDTH),
        "qkv_bias": _biased(shapes, "attn_q"),
    }  # fmt: skip


def _delta(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """Qwen3-Next and Qwen3.5. The file's last layers may be those for multi-token prediction."""
    f.get("rope.dimension_sections")  # without images all sections have the token's position
    config = read_decoder(f, shapes, partial=True)
    drafting = f.integer("nextn_predict_layers", 0, config["num_hidden_layers"] - 1, 0)
    layers = config["num_hidden_layers"] = config["num_hidden_layers"] - drafting
    rope = {"rope_theta": config.pop("rope_theta"), "partial_rotary_factor": config.pop("partial_rotary_factor")}
    config["rope_parameters"] = (config.pop("rope_scaling") or {"rope_type": "default"}) | rope
    every = f.integer("full_attention_interval", 1, MAX_LAYERS, 4)
    heads, keys = f.integer("ssm.time_step_rank", 1, MAX_WIDTH), f.integer("ssm.group_count", 1, MAX_WIDTH)
    if architecture != "qwen3next":
        config["mtp_num_hidden_layers"] = drafting
    config |= {
        "model_type": {"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text"}.get(architecture, "qwen3_5_moe_text"),
        "attention_bias": _biased(shapes, "attn_q"),
        "layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        "linear_conv_kernel_dim": f.integer("ssm.conv_kernel", 1, MAX_WIDTH),
        "linear_key_head_dim": f.integer("ssm.state_size", 1, MAX_WIDTH),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": f.integer("ssm.inner_size", heads, MAX_WIDTH) // heads,
        "linear_value_heads_tiled": architecture != "qwen3next" and heads != keys,
    }
    if architecture == "qwen35":
        return config
    experts = read_routed_experts(f, normalise=True)
    shared = f.integer("expert_shared_feed_forward_length", 1, MAX_WIDTH, experts["moe_intermediate_size"])
    return config | experts | {"shared_expert_intermediate_size": shared}


def _olmoe(f: Fields, architecture: str, shapes: Shapes) -> Config:
    return read_decoder(f, shapes) | read_expert_counts(f) | {"model_type": "olmoe", "norm_topk_prob": False}


def _sigmoid_experts(f: Fields, *, normalise: bool) -> Config:
    f.expect("expert_gating_func", _SIGMOID)
    return {
        "n_routed_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "n_shared_experts": f.integer("expert_shared_count", 0, MAX_EXPERTS, 0),
        "first_k_dense_replace": f.integer("leading_dense_block_count", 0, MAX_LAYERS, 0),
        "routed_scaling_factor": f.number("expert_weights_scale", 1e-6, 1e6, 1.0),
        "norm_topk_prob": f.flag("expert_weights_norm", normalise),
        "n_group": f.integer("expert_group_count", 1, MAX_EXPERTS, 1),
        "topk_group": f.integer("expert_group_used_count", 1, MAX_EXPERTS, 1),
    }


def _glm4moe(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """The file's last layers may be those for multi-token prediction."""
    config = read_decoder(f, shapes, partial=True) | _sigmoid_experts(f, normalise=True)
    drafting = f.integer("nextn_predict_layers", 0, config["num_hidden_layers"] - 1, 0)
    return config | {
        "model_type": "glm4_moe",
        "num_hidden_layers": config["num_hidden_layers"] - drafting,
        "num_nextn_predict_layers": drafting,
        "attention_bias": _biased(shapes, "attn_q"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }


def _dots1(f: Fields, architecture: str, shapes: Shapes) -> Config:
    config = read_decoder(f, shapes) | _sigmoid_experts(f, normalise=False)
    return config | {
        "model_type": "dots1",
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
        "attention_bias": _biased(shapes, "attn_q"),
    }


def _ernie_moe(f: Fields, architecture: str, shapes: Shapes) -> Config:
    f.get("expert_shared_feed_forward_length")  # the converter derives it from numbers that have no relation to it
    return read_decoder(f, shapes) | {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "moe_k": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "moe_num_shared_experts": f.integer("expert_shared_count", 0, MAX_EXPERTS, 0),
        "moe_layer_start_index": f.integer("leading_dense_block_count", 0, MAX_LAYERS, 0),
        "moe_layer_interval": f.integer("interleave_moe_layer_step", 1, MAX_LAYERS, 1),
    }


def _hunyuan_moe(f: Fields, architecture: str, shapes: Shapes) -> Config:
    f.get("rope.scaling.original_context_length")  # the base already contains the scaling
    config = read_decoder(f, shapes)
    f.expect("expert_shared_feed_forward_length", config["intermediate_size"])
    return config | {
        "model_type": "hunyuan_v1_moe",
        "num_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "moe_topk": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH, config["intermediate_size"]),
        "num_shared_expert": f.integer("expert_shared_count", 0, MAX_EXPERTS, 1),
        "attention_bias": _biased(shapes, "attn_q"),
    }


def _minimax_m2(f: Fields, architecture: str, shapes: Shapes) -> Config:
    f.expect("expert_gating_func", _SIGMOID)
    f.expect("expert_weights_norm", True)
    config = read_decoder(f, shapes, partial=True) | read_expert_counts(f) | {"model_type": "minimax_m2"}
    return config | {"intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH)}


READERS = {
    "arcee": _arcee,
    "cohere2": _cohere2,
    "dots1": _dots1,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "gpt-oss": _gpt_oss,
    "gptneox": _gpt_neox,
    "granite": _granite,
    "granitemoe": _granite,
    "hunyuan-dense": _hunyuan_dense,
    "hunyuan-moe": _hunyuan_moe,
    "minimax-m2": _minimax_m2,
    "nemotron": _nemotron,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2moe,
    "qwen3next": _delta,
    "qwen35": _delta,
    "qwen35moe": _delta,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
