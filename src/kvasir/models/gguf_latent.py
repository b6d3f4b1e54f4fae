"""Converts the metadata of GGUF files of decoders with latent attention, and of MiMo-V2, to the `config.json` that our
classes read.

What a file does not say is what llama.cpp assumes for the architecture: its converters and `llama-model.cpp`.
"""

from __future__ import annotations

from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.models.config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_WIDTH,
    Fields,
)
from kvasir.models.gguf_fields import Shapes, read_decoder, read_layer_types

_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of gating functions


def _latent(f: Fields, shapes: Shapes, *, value_dim: int = 0) -> dict[str, Any]:
    """The sizes of latent attention and those of any decoder. value_dim: the default of a head's, 0 for none.

    A file with a matrix for each head states the sizes of the absorbed form as those of keys and values, and a head's
    own beside them.
    """
    absorbed = f.get("attention.key_length_mla") is not None
    suffix = "_mla" if absorbed else ""
    rank = f.integer("attention.kv_lora_rank", 1, MAX_WIDTH)
    turning = f.integer("rope.dimension_count", 2, MAX_HEAD_DIM)
    keys = f.integer(f"attention.key_length{suffix}", turning + 1, MAX_WIDTH)
    values = f.integer(f"attention.value_length{suffix}", 1, MAX_WIDTH, *([value_dim] if value_dim else []))
    if absorbed:
        f.expect("attention.key_length", rank + turning)
        f.expect("attention.value_length", rank)
    f.get("attention.head_count_kv")  # 1 in the absorbed form
    heads = f.get("attention.head_count")
    lengths = {"attention.key_length": turning, "attention.value_length": turning, "attention.head_count_kv": heads}
    config = read_decoder(Fields({**f.values, **lengths}, f.where, f.read), shapes)
    del config["head_dim"]
    return config | {
        "kv_lora_rank": rank,
        "q_lora_rank": f.integer("attention.q_lora_rank", 0, MAX_WIDTH, 0) or None,
        "qk_nope_head_dim": keys - turning,
        "qk_rope_head_dim": turning,
        "v_head_dim": values,
    }


def _deepseek2(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """DeepSeek-V2, V3 and models like them, distinguished by the experts' gating function; a Mistral 4 if queries grow,
    a Youtu-LLM without experts. The norms of latents have the epsilon of the models' own code, which the file does not
    state."""
    config = _latent(f, shapes)
    if config["rope_scaling"]:  # 0.1 mscale_all_dim; mscale itself, which the file does not state, has its value
        weight = round(10 * f.number("rope.scaling.yarn_log_multiplier", 0.0, 1e3, 0.0), 6)
        config["rope_scaling"] |= {"mscale": weight, "mscale_all_dim": weight} if weight else {}
    if architecture == "deepseek2" and not f.integer("expert_count", 0, MAX_EXPERTS, 0):
        return config | _youtu(f, config["num_hidden_layers"])
    config |= _deepseek_experts(f, config["num_hidden_layers"], shapes)
    if architecture == "mistral4" or f.get("attention.temperature_scale") is not None:
        return _mistral4(f, config)
    return config


def _youtu(f: Fields, layers: int) -> dict[str, Any]:
    """What the converter writes of experts for a model without any."""
    f.integer("leading_dense_block_count", layers, MAX_LAYERS, layers)
    f.get("expert_feed_forward_length")
    for absent in ("expert_used_count", "expert_shared_count"):
        f.expect(absent, 0)
    return {"model_type": "youtu"}


def _mistral4(f: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """As llama.cpp's converter writes a model folder, the file does not state how queries grow, and they do not;
    Mistral's own files state it."""
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    length = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    f.expect("attention.temperature_length", length)
    beta = f.number("attention.temperature_scale", 0.0, 1e3, 0.0)
    growth = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": length} if beta else {}
    if config["model_type"] != "deepseek_v2":
        raise UnsupportedModel(f"{f.where}: expert_gating_func is {_SIGMOID}, sigmoid", "Mistral 4 has softmax")
    del config["topk_method"]
    return config | {
        "model_type": "mistral4",
        "rope_parameters": {**scaling, "rope_theta": config.pop("rope_theta"), **growth},
    }


def _deepseek_experts(f: Fields, layers: int, shapes: Shapes) -> dict[str, Any]:
    drafting = f.integer("nextn_predict_layers", 0, layers - 1, 0)
    gating = f.integer("expert_gating_func", 0, _SIGMOID, _SOFTMAX) or _SOFTMAX
    groups = f.integer("expert_group_count", 1, MAX_EXPERTS, 1)
    methods = {_SIGMOID: "noaux_tc", _SOFTMAX: "greedy" if groups == 1 else "group_limited_greedy"}
    return {
        "model_type": {_SIGMOID: "deepseek_v3", _SOFTMAX: "deepseek_v2"}[gating],
        "num_hidden_layers": layers - drafting,
        **({"num_nextn_predict_layers": drafting} if drafting else {}),
        "topk_method": methods[gating],
        "n_routed_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "n_shared_experts": f.integer("expert_shared_count", 0, MAX_EXPERTS, 0),
        "first_k_dense_replace": f.integer("leading_dense_block_count", 0, MAX_LAYERS, 0),
        "routed_scaling_factor": f.number("expert_weights_scale", 1e-6, 1e6, 1.0),
        "norm_topk_prob": f.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": f.integer("expert_group_used_count", 1, MAX_EXPERTS, 1),
        "attention_bias": any(name.endswith("attn_kv_a_mqa.bias") for name in shapes),
    }


def _deepseek32(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """DeepSeek-V3.2 and GLM-5: a DeepSeek-V3 with indexers. A layer without one reuses the selection of another."""
    config = _deepseek2(f, architecture, shapes)
    layers = config["num_hidden_layers"]
    selects = f.get("attention.indexer.types")
    if selects is None:
        selects = [f"blk.{i}.indexer.attn_q_b.weight" in shapes for i in range(layers)]
    if isinstance(selects, bool):  # the same for all layers
        selects = [selects] * layers
    if not isinstance(selects, list) or len(selects) < layers or not all(kind in (0, 1) for kind in selects):
        raise ModelFileError(
            f"{f.where}: attention.indexer.types is {quoted(selects)}", f"expected true or false for {layers} layers"
        )
    kinds = ["full" if kind else "shared" for kind in selects[:layers]]
    is_glm = architecture == "glm-dsa"
    return config | {
        "model_type": "glm_moe_dsa" if is_glm else "deepseek_v32",
        **({"indexer_types": kinds} if is_glm else {}),
        "index_n_heads": f.integer("attention.indexer.head_count", 1, MAX_HEADS),
        "index_head_dim": f.integer("attention.indexer.key_length", 1, MAX_HEAD_DIM),
        "index_topk": f.integer("attention.indexer.top_k", 1, MAX_POSITIONS),
    }


def _minicpm3(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """The file does not hold the multipliers, which are those of the only published model."""
    heads = f.integer("attention.head_count", 1, MAX_WIDTH)
    whole = f.integer("embedding_length", heads, MAX_POSITIONS) // heads
    return _latent(f, shapes, value_dim=whole) | {
        "model_type": "minicpm3",
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }


def _mimo2(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """The numbers of key-value heads are per layer, those for multi-token prediction included. The window counts the
    token's own position, as in llama.cpp."""
    drafting = f.integer("nextn_predict_layers", 0, MAX_LAYERS, 0)
    layers = f.integer("block_count", 1 + drafting, MAX_LAYERS) - drafting
    slides = [kind == "sliding_attention" for kind in read_layer_types(f, layers + drafting, pattern=6)]
    counts = f.get("attention.head_count_kv")
    counts = counts if isinstance(counts, list) else [counts] * (layers + drafting)
    known = len(counts) == len(slides) and all(type(count) in (int, type(None)) for count in counts)
    if not known or len(found := set(zip(slides, counts, strict=True))) > 2:
        raise ModelFileError(f"{f.where}: attention.head_count_kv is {quoted(counts)}",
                             "expected a number per layer, the same for all with a window")  # fmt: skip
    heads = dict(found)
    full, windowed = heads.get(False, counts[0]), heads.get(True, counts[0])
    values = f.integer("attention.value_length", 1, MAX_HEAD_DIM)
    lengths = {"attention.value_length": f.get("attention.key_length"), "attention.head_count_kv": full}
    config = read_decoder(Fields({**f.values, **lengths}, f.where, f.read), shapes, partial=True)
    share, theta = config.pop("partial_rotary_factor"), config.pop("rope_theta")
    thetas = theta, f.number("rope.freq_base_swa", 1.0, 1e12, theta)
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    kinds = zip(("full_attention", "sliding_attention"), thetas, strict=True)
    f.expect("expert_gating_func", _SIGMOID)
    f.expect("expert_weights_norm", True)
    return config | {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": layers,
        **({"num_nextn_predict_layers": drafting} if drafting else {}),
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in slides[:layers]],
        "mlp_layer_types": ["sparse" if f"blk.{i}.ffn_gate_inp.weight" in shapes else "dense" for i in range(layers)],
        "swa_num_key_value_heads": windowed,
        "v_head_dim": values,
        "rope_parameters": {
            kind: {**scaling, "rope_theta": one, "partial_rotary_factor": share} for kind, one in kinds
        },
        "sliding_window": f.integer("attention.sliding_window", 1, MAX_POSITIONS),
        "attention_value_scale": f.number("attention.value_scale", 0.0, 1e3, 1.0),
        "n_routed_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "routed_scaling_factor": f.number("expert_weights_scale", 1e-6, 1e6, 1.0),
        "n_group": f.integer("expert_group_count", 1, MAX_EXPERTS, 1),
        "topk_group": f.integer("expert_group_used_count", 1, MAX_EXPERTS, 1),
        "attention_bias": any(name.endswith("attn_q.bias") for name in shapes),
    }


READERS = {
    "deepseek2": _deepseek2,
    "deepseek32": _deepseek32,
    "glm-dsa": _deepseek32,
    "mimo2": _mimo2,
    "minicpm3": _minicpm3,
    "mistral4": _deepseek2,
}
