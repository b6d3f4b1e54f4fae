"""Converts the metadata of GGUF files of further decoders to the `config.json` that our classes read, as in
`gguf_llamas`."""

from __future__ import annotations

from typing import Any

from kvasir.models.config import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields
from kvasir.models.gguf_fields import (
    Shapes,
    read_decoder,
    read_layer_types,
    read_routed_experts,
    read_vocab_size,
    rows_of,
)

Config = dict[str, Any]


def _afmoe(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """As in llama.cpp, embeddings are scaled, and every 4th layer has no window."""
    f.expect("expert_gating_func", 2)  # sigmoid
    f.expect("expert_weights_norm", True)
    config = read_decoder(f, shapes)
    return config | {
        "model_type": "afmoe",
        "mup_enabled": True,
        "sliding_window": f.integer("attention.sliding_window", 1, MAX_POSITIONS),
        "layer_types": read_layer_types(f, config["num_hidden_layers"], pattern=4),
        "num_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "num_shared_experts": f.integer("expert_shared_count", 1, MAX_EXPERTS),
        "num_dense_layers": f.integer("leading_dense_block_count", 0, MAX_LAYERS, 0),
        "route_scale": f.number("expert_weights_scale", 1e-6, 1e6, 1.0),
    }


def _jais2(f: Fields, architecture: str, shapes: Shapes) -> Config:
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    return read_decoder(f, shapes, eps="layer_norm_eps") | {"model_type": "jais2", "hidden_act": "relu2"} | biases


def _dbrx(f: Fields, architecture: str, shapes: Shapes) -> Config:
    f.expect("attention.layer_norm_epsilon", 1e-5)
    theta = f.number("rope.freq_base", 1.0, 1e12, 10000.0)
    return {
        "model_type": "dbrx",
        "vocab_size": read_vocab_size(f, shapes),
        "d_model": f.integer("embedding_length", 1, MAX_WIDTH),
        "n_layers": f.integer("block_count", 1, MAX_LAYERS),
        "n_heads": f.integer("attention.head_count", 1, MAX_HEADS),
        "max_seq_len": f.integer("context_length", 1, MAX_POSITIONS),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attn_config": {
            "kv_n_heads": f.integer("attention.head_count_kv", 1, MAX_HEADS),
            "clip_qkv": f.number("attention.clamp_kqv", 0.0, 1e6, 0.0) or None,
            "rope_theta": theta,
        },
        "ffn_config": {
            "ffn_hidden_size": f.integer("feed_forward_length", 1, MAX_WIDTH),
            "moe_num_experts": f.integer("expert_count", 1, MAX_EXPERTS),
            "moe_top_k": f.integer("expert_used_count", 1, MAX_EXPERTS),
        },
    }


def _exaone_moe(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """The file's last layers may be those for multi-token prediction."""
    f.expect("expert_gating_func", 2)  # sigmoid
    f.get("expert_shared_feed_forward_length")  # the product of two others
    config = read_decoder(f, shapes)
    layers = config["num_hidden_layers"] - f.integer("nextn_predict_layers", 0, config["num_hidden_layers"] - 1, 0)
    window = f.integer("attention.sliding_window", 0, MAX_POSITIONS, 0)
    return config | {
        "model_type": "exaone_moe",
        "num_hidden_layers": layers,
        "sliding_window": window or None,
        "layer_types": read_layer_types(f, layers, pattern=4) if window else ["full_attention"] * layers,
        "num_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "num_shared_experts": f.integer("expert_shared_count", 0, MAX_EXPERTS, 0),
        "first_k_dense_replace": f.integer("leading_dense_block_count", 0, MAX_LAYERS, 0),
        "routed_scaling_factor": f.number("expert_weights_scale", 1e-6, 1e6, 1.0),
        "norm_topk_prob": f.flag("expert_weights_norm", True),
        "n_group": f.integer("expert_group_count", 1, MAX_EXPERTS, 1),
        "topk_group": f.integer("expert_group_used_count", 1, MAX_EXPERTS, 1),
    }


def _llama_embed(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """A Llama that attends in both directions; the file says how its rows are pooled."""
    f.expect("attention.causal", False)
    biases = {"attention_bias": "blk.0.attn_q.bias" in shapes, "mlp_bias": "blk.0.ffn_up.bias" in shapes}
    return read_decoder(f, shapes) | biases | {
        "model_type": "llama_bidirec",
        "architectures": ["LlamaBidirectionalModel"],
        "tie_word_embeddings": False,
    }  # fmt: skip


def _mellum(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """Layers with a window rotate without scaling, by a base of their own if the file has one. As in llama.cpp, the
    weights of a token's experts are divided by their sum."""
    config = read_decoder(f, shapes)
    window, theta = f.integer("attention.sliding_window", 0, MAX_POSITIONS, 0), config.pop("rope_theta")
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    layers = config["num_hidden_layers"]
    return config | read_routed_experts(f, normalise=True) | {
        "model_type": "mellum",
        "layer_types": read_layer_types(f, layers, pattern=4) if window else ["full_attention"] * layers,
        **({"sliding_window": window} if window else {}),
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": f.number("rope.freq_base_swa", 1.0, 1e12, theta),
            },
        },
    }  # fmt: skip


def _mistral3(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """A Ministral 3, whose queries grow if the file has a scale of their temperature, or a Mistral."""
    config = read_decoder(f, shapes)
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {"rope_type": "default"}
    weight = f.number("rope.scaling.yarn_log_multiplier", 0.0, 1e3, 0.0)
    if scaling["rope_type"] == "yarn" and weight:  # as in llama.cpp, `mscale` is 1
        scaling |= {"mscale": 1.0, "mscale_all_dim": weight}
    beta = f.number("attention.temperature_scale", 0.0, 1e3, 0.0)
    return config | {
        "model_type": "ministral3",
        "rope_parameters": {**scaling, "rope_theta": theta} | ({"llama_4_scaling_beta": beta} if beta else {}),
    }


def _cohere2moe(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """RMSNorms if the file has their epsilon. As in llama.cpp, the first dense layers rotate, with a window or without;
    the shared expert is averaged with the others."""
    rms = f.get("attention.layer_norm_rms_epsilon") is not None
    config = read_decoder(f, shapes, eps="rms_norm_eps" if rms else "layer_norm_eps")
    f.get("nextn_predict_layers")
    layers, scores = config["num_hidden_layers"], f.integer("expert_gating_func", 0, 2, 2) or 2
    dense = f.integer("leading_dense_block_count", 0, layers, 0)
    inner = f.integer("expert_feed_forward_length", 1, MAX_WIDTH, config["intermediate_size"])
    f.get("expert_shared_feed_forward_length")  # the product of two others
    f.expect("expert_weights_scale", 1.0)
    return config | {
        "model_type": "cohere2_moe",
        "intermediate_size": inner,
        "prefix_dense_intermediate_size": rows_of(shapes, "blk.0.ffn_gate.weight") if dense else inner,
        "prefix_dense_sliding_window_pattern": 1,
        "first_k_dense_replace": dense,
        "layer_types": read_layer_types(f, layers, pattern=4),
        "sliding_window": f.integer("attention.sliding_window", 1, MAX_POSITIONS),
        "logit_scale": f.number("logit_scale", 1e-6, 1e6),
        "num_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "num_shared_experts": f.integer("expert_shared_count", 0, MAX_EXPERTS, 0),
        "expert_selection_fn": {1: "softmax", 2: "sigmoid"}[scores],
        "norm_topk_prob": f.flag("expert_weights_norm", False),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
    }


def _hy_v3(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """The file's last layers may be those for multi-token prediction."""
    f.expect("expert_gating_func", 2)  # sigmoid
    f.expect("expert_weights_norm", True)
    config = read_decoder(f, shapes)
    drafting = f.integer("nextn_predict_layers", 0, config["num_hidden_layers"] - 1, 0)
    layers = config["num_hidden_layers"] - drafting
    inner = f.integer("expert_feed_forward_length", 1, MAX_WIDTH)
    return config | {
        "model_type": "hy_v3",
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": drafting,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_layer_types": ["sparse" if f"blk.{i}.ffn_gate_inp.weight" in shapes else "dense" for i in range(layers)],
        "num_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": inner,
        "num_shared_experts": f.integer("expert_shared_feed_forward_length", inner, MAX_WIDTH, inner) // inner,
        "router_scaling_factor": f.number("expert_weights_scale", 1e-6, 1e6, 1.0),
    }


READERS = {
    "afmoe": _afmoe,
    "cohere2moe": _cohere2moe,
    "dbrx": _dbrx,
    "exaone-moe": _exaone_moe,
    "hy-v3": _hy_v3,  # earlier files
    "hy_v3": _hy_v3,
    "jais2": _jais2,
    "llama-embed": _llama_embed,
    "mellum": _mellum,
    "mistral3": _mistral3,
}
