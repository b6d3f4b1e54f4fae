"""Converts the metadata of GGUF files of Gemma 3n, Gemma 4 and its assistants to the `config.json` of our classes.

Source: llama.cpp's converters of these models and their loaders. The width of a head is that of full-attention layers;
layers with a window have a key of their own. Which part of a head turns in full-attention layers is in a tensor.
"""

from __future__ import annotations

import math
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.models.config import MAX_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields
from kvasir.models.gguf_fields import Shapes, read_decoder, read_layer_types, rows_of
from kvasir.models.gguf_lfm2 import read_kv_heads
from kvasir.models.registry import ASSISTANTS

Config = dict[str, Any]
_OWN = 20  # layers with keys and values of their own
_NEVER = 1e20  # a divisor of frequencies beyond this one means that the pair does not turn


def put_share(config: Config, factors: list[float]) -> None:
    """Puts the share of a head that turns into the rotary settings of full-attention layers. factors: the divisors of
    all frequencies, of which the converter makes 1 for the first and 1e30 for the others. Raises ModelFileError for
    others."""
    turning = sum(factor < _NEVER for factor in factors)
    if factors[:turning] != [1.0] * turning or len(factors) != config["global_head_dim"] // 2:
        raise ModelFileError(
            "rope_freqs.weight is not that of a Gemma 4",
            f"expected {config['global_head_dim'] // 2} numbers: 1 for pairs that turn, then 1e30 for the others",
        )
    share = math.nextafter(turning / len(factors), 1.0)  # whose product with the width is not rounded below the number
    full = config["rope_parameters"]["full_attention"]
    full |= {"rope_type": "proportional", "partial_rotary_factor": min(1.0, share)}


def _per_layer(f: Fields, key: str, layers: int, least: int) -> list[int]:
    """A number for each layer, from one for all or from a list. Afterwards `f` has the least of them."""
    given = f.get(key)
    values = given if isinstance(given, list) else [given] * layers
    if len(values) != layers or not all(type(n) is int and least <= n <= MAX_WIDTH for n in values):
        raise ModelFileError(f"{f.where}: {key} is {given!r:.80}", f"expected a number for each of {layers} layers")
    f.values = {**f.values, key: min(values)}
    return values


def _read_shared(f: Fields, layers: int) -> int:
    return f.integer("attention.shared_kv_layers", 0, layers - 1, 0)


def _gemma4(f: Fields, architecture: str, shapes: Shapes) -> Config:
    layers = f.integer("block_count", 1, MAX_LAYERS)
    kv_heads = read_kv_heads(f)
    inners = _per_layer(f, "feed_forward_length", layers, 1)
    types = read_layer_types(f, layers, pattern=6)
    shared = _read_shared(f, layers)
    config = read_decoder(f, shapes)
    full, inner = config["head_dim"], config["intermediate_size"]
    local = f.integer("attention.key_length_swa", 2, MAX_HEAD_DIM, full)
    f.expect("attention.value_length_swa", local)
    f.expect("rope.dimension_count_swa", local)
    wide = inners[-1] != inner
    expected = [inner * (2 if wide and i >= layers - shared else 1) for i in range(layers)]
    if inners != expected:
        raise ModelFileError(f"{f.where}: feed_forward_length is {inners!r:.80}", f"expected {expected!r:.80}")
    theta = config.pop("rope_theta")
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    own = [i for i in range(layers - shared) if types[i] == "full_attention"]
    return config | {
        "model_type": "gemma4_text",
        "head_dim": local,
        "global_head_dim": full,
        "per_layer_config": {
            str(i): {"head_dim": full if kind == "full_attention" else local, "num_key_value_heads": kv_heads[i]}
            for i, kind in enumerate(types)
        },
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "attention_k_eq_v": bool(own) and f"blk.{own[0]}.attn_v.weight" not in shapes,
        "sliding_window": f.integer("attention.sliding_window", 1, MAX_POSITIONS),
        "final_logit_softcapping": f.number("final_logit_softcapping", 0.0, 1e6, 0.0) or None,
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": f.number("rope.freq_base_swa", 1.0, 1e12, 1e4)},
        },
        **_read_vectors(f, shapes),
        **_read_experts(f),
    }


def _read_vectors(f: Fields, shapes: Shapes) -> Config:
    """The per-layer embeddings."""
    width = f.integer("embedding_length_per_layer_input", 0, MAX_WIDTH, 0)
    vocab = {"vocab_size_per_layer_input": rows_of(shapes, "per_layer_token_embd.weight")} if width else {}
    return {"hidden_size_per_layer_input": width, **vocab}


def _read_experts(f: Fields) -> Config:
    inner = f.integer("expert_feed_forward_length", 0, MAX_WIDTH, 0)
    top_k = f.integer("expert_used_count", 0, MAX_EXPERTS, 0)
    if not (experts := f.integer("expert_count", 0, MAX_EXPERTS, 0)):
        return {}
    found = {"num_experts": experts, "top_k_experts": top_k, "moe_intermediate_size": inner}
    return {"enable_moe_block": True, **{name: value or None for name, value in found.items()}}


def _gemma3n(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """As in llama.cpp, the layers beyond the first 20 read keys and values of others if the file does not say so."""
    layers = f.integer("block_count", 1, MAX_LAYERS)
    inners = _per_layer(f, "feed_forward_length", layers, 1)
    types = read_layer_types(f, layers, pattern=5)
    config = read_decoder(f, shapes)
    theta = config.pop("rope_theta")
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    return config | {
        "model_type": "gemma3n_text",
        "intermediate_size": inners,
        "layer_types": types,
        "num_kv_shared_layers": f.integer("attention.shared_kv_layers", 0, layers - 1, max(0, layers - _OWN)),
        "sliding_window": f.integer("attention.sliding_window", 1, MAX_POSITIONS),
        "final_logit_softcapping": f.number("final_logit_softcapping", 1e-3, 1e6, 30.0),
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": f.number("rope.freq_base_swa", 1.0, 1e12, 1e4)},
        },
        "altup_num_inputs": f.integer("altup.num_inputs", 1, MAX_EXPERTS, 4),
        "altup_active_idx": f.integer("altup.active_idx", 0, MAX_EXPERTS, 0),
        "laurel_rank": rows_of(shapes, "blk.0.laurel_l.weight"),
        "activation_sparsity_scale": _read_deviations(f, layers),
        **_read_vectors(f, shapes),
    }


def _read_deviations(f: Fields, layers: int) -> list[float | None] | None:
    """By how many standard deviations a gate must exceed the mean of its row; None for no cut, which the file states as
    minus infinity."""
    given = f.get("activation_sparsity_scale")
    if given is None:
        return None
    values = given if isinstance(given, list) else [given] * layers
    if len(values) != layers or not all(isinstance(value, float) and not math.isnan(value) for value in values):
        raise ModelFileError(
            f"{f.where}: activation_sparsity_scale is {given!r:.80}", f"expected a number for each of {layers} layers"
        )
    return [None if value == -math.inf else value for value in values]


def _assistant(f: Fields, architecture: str, shapes: Shapes) -> Config:
    """An assistant, all of whose layers read keys and values of its target."""
    layers = f.integer("block_count", 1, MAX_LAYERS)
    f.expect("attention.shared_kv_layers", layers)
    f.integer("nextn_predict_layers", 0, MAX_LAYERS, 0)
    f.values = {**f.values, "attention.shared_kv_layers": 0}
    return {
        "model_type": "gemma4_assistant",
        "architectures": [ASSISTANTS[0]],
        "backbone_hidden_size": f.integer("embedding_length_out", 1, MAX_WIDTH),
        "text_config": _gemma4(f, architecture, shapes),
    }


READERS = {"gemma3n": _gemma3n, "gemma4": _gemma4, "gemma4-assistant": _assistant}
