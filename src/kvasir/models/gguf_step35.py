"""GGUF files of Step-3.5 (architecture step35): their metadata as a `config.json`.

What differs by layer is in arrays, the layers for multi-token prediction included. Layers without a window rotate half
of each head, whatever the file's `rope.dimension_count`; the factors of their frequencies are a tensor that ends in
ones. Source: llama.cpp's `src/models/step35.cpp` and its converter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvasir.errors import ModelFileError, quoted
from kvasir.models.config import MAX_EXPERTS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields
from kvasir.models.gguf_fields import Shapes, read_decoder, read_layer_types

ARCHITECTURE = "step35"
_SIGMOID = 2  # expert_gating_func
_SHARE = 0.5  # of a head that turns in layers without a window


def _step35(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    drafting = f.integer("nextn_predict_layers", 0, MAX_LAYERS, 0)
    total = f.integer("block_count", 1 + drafting, MAX_LAYERS)
    kinds = read_layer_types(f, total, pattern=4)
    full, windowed = _heads(f, kinds)
    config = read_decoder(Fields({**f.values, "attention.head_count": full}, f.where, f.read), shapes)
    theta = config.pop("rope_theta")
    thetas = {"full_attention": theta, "sliding_attention": f.number("rope.freq_base_swa", 1.0, 1e12, theta)}
    f.expect("rope.dimension_count_swa", config["head_dim"])
    f.expect("expert_gating_func", _SIGMOID)
    f.expect("expert_weights_norm", True)
    for other in ("leading_dense_block_count", "moe_every_n_layers", "expert_shared_count"):  # the tensors say it
        f.get(other)
    return config | {
        "model_type": "step3p5",
        "num_hidden_layers": total - drafting,
        **({"num_nextn_predict_layers": drafting} if drafting else {}),
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if f"blk.{i}.ffn_gate_inp.weight" in shapes else "dense" for i in range(total)],
        "num_sliding_attention_heads": windowed,
        "rope_theta": [thetas[kind] for kind in kinds],
        "partial_rotary_factors": [_SHARE if kind == "full_attention" else 1.0 for kind in kinds],
        "sliding_window": f.integer("attention.sliding_window", 1, MAX_POSITIONS),
        "n_routed_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "share_expert_dim": f.integer("expert_shared_feed_forward_length", 1, MAX_WIDTH),
        "moe_router_scaling_factor": f.number("expert_weights_scale", 1e-6, 1e6, 1.0),
        "swiglu_limits": _by_layer(f, "swiglu_clamp_exp", total),
        "swiglu_limits_shared": _by_layer(f, "swiglu_clamp_shexp", total),
    }


def _heads(f: Fields, kinds: Sequence[str]) -> tuple[Any, Any]:
    """The heads of layers without and with a window."""
    counts = f.get("attention.head_count")
    counts = counts if isinstance(counts, list) else [counts] * len(kinds)
    known = len(counts) == len(kinds) and all(type(count) in (int, type(None)) for count in counts)
    if not known or len(found := set(zip(kinds, counts, strict=True))) > 2:
        raise ModelFileError(f"{f.where}: attention.head_count is {quoted(counts)}",
                             "expected a number per layer, the same for all with a window")  # fmt: skip
    heads = dict(found)
    return heads.get("full_attention", counts[0]), heads.get("sliding_attention", counts[0])


def _by_layer(f: Fields, name: str, layers: int) -> list[Any] | None:
    """An array, of which equal numbers are read as one."""
    given = f.get(name)
    return given if given is None or isinstance(given, list) else [given] * layers


def turning(factors: list[float], head_dim: int) -> list[float]:
    """The factors of the frequencies of layers without a window."""
    return factors[: int(head_dim * _SHARE) // 2]


READERS = {ARCHITECTURE: _step35}
