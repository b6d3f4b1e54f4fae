"""The parts of a GGUF file's metadata that architectures share, as fields of a `config.json`.

Keys and their meaning: the GGUF specification (docs/gguf.md of the ggml project).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.elementary import log
from kvasir.models.config import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)
from kvasir.models.gguf_view import TensorSource

Shapes = Mapping[str, tuple[int, ...]]
_POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last"}  # the numbers of llama.cpp's llama_pooling_type


def architecture_fields(metadata: Mapping[str, Any], architecture: str) -> Fields:
    """The architecture's own keys without their prefix, as plain values, and those of xIELU."""
    prefix = f"{architecture}."
    keys = (key for key in metadata if key.startswith((prefix, "xielu.")))
    values = {key.removeprefix(prefix): _plain(metadata[key]) for key in keys}
    return Fields(values, f"GGUF metadata of {architecture}")


def _plain(value: Any) -> Any:
    """Converts a metadata value: a per-layer array of equal numbers to that number, a float32 to its shortest
    decimal, arrays in arrays to lists."""
    if isinstance(value, list):
        return [part.tolist() if isinstance(part, np.ndarray) else _plain(part) for part in value]
    if isinstance(value, np.ndarray):
        same = value.size and bool((value == value.flat[0]).all())
        return _plain(value.flat[0].item()) if same else value.tolist()
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if float(single) == value else value
    return value


def read_decoder(f: Fields, shapes: Shapes, *, partial: bool = False, eps: str = "rms_norm_eps") -> dict[str, Any]:
    """The fields that all Llama-like decoders share. partial: whether a part of a head may be rotated. eps: the name
    of the norms' epsilon in `config.json`; any but the default is that of LayerNorms."""
    hidden = f.integer("embedding_length", 1, MAX_WIDTH)
    heads = f.integer("attention.head_count", 1, min(MAX_HEADS, hidden))
    head_dim = f.integer("attention.key_length", 1, MAX_WIDTH, hidden // heads)
    f.expect("attention.value_length", head_dim)
    if not partial:
        f.expect("rope.dimension_count", head_dim)
    turning = f.integer("rope.dimension_count", 2, head_dim, head_dim)
    layer_norm = "attention.layer_norm_epsilon" if eps != "rms_norm_eps" else "attention.layer_norm_rms_epsilon"
    return (
        {
            "vocab_size": read_vocab_size(f, shapes),
            "hidden_size": hidden,
            "intermediate_size": f.integer("feed_forward_length", 1, MAX_WIDTH, f.get("expert_feed_forward_length")),
            "num_hidden_layers": f.integer("block_count", 1, MAX_LAYERS),
            "num_attention_heads": heads,
            "num_key_value_heads": f.integer("attention.head_count_kv", 1, MAX_HEADS, heads),
            "head_dim": head_dim,
            "max_position_embeddings": f.integer("context_length", 1, MAX_POSITIONS),
            eps: f.number(layer_norm, 0.0, 1.0),
            "rope_theta": f.number("rope.freq_base", 1.0, 1e12, 10000.0),
            "rope_scaling": _rope_scaling(f),
            "tie_word_embeddings": "output.weight" not in shapes,
        }
        | ({"partial_rotary_factor": turning / head_dim} if partial else {})
        | read_pooling(f)
    )


def read_expert_counts(f: Fields) -> dict[str, int]:
    return {
        "num_local_experts": f.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": f.integer("expert_used_count", 1, MAX_EXPERTS),
    }


def read_routed_experts(f: Fields, *, normalise: bool) -> dict[str, Any]:
    """The fields of experts with an inner width of their own. normalise: whether llama.cpp divides a token's weights by
    their sum, whatever the file sets."""
    f.expect("expert_weights_norm", normalise)
    return read_expert_counts(f) | {
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "norm_topk_prob": normalise,
    }


def read_layer_types(f: Fields, layers: int, pattern: int) -> list[str]:
    """From a flag per layer, or from a period N where every Nth layer has full attention. pattern: the default
    period."""
    given = f.get("attention.sliding_window_pattern")
    if isinstance(given, list) and len(given) == layers and all(value in (0, 1) for value in given):
        slides = [bool(value) for value in given]
    elif isinstance(given, bool):
        slides = [given] * layers
    else:
        pattern = f.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, pattern)
        slides = [(i + 1) % pattern != 0 for i in range(layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in slides]


def _rope_scaling(f: Fields) -> dict[str, Any] | None:
    """The scaling in Hugging Face's terms; `read_rope` checks the fields that each kind requires. As in llama.cpp, a
    factor without a type means linear scaling, and a factor of 0 means none."""
    kind = f.choice("rope.scaling.type", ("none", "linear", "yarn", "longrope"), "linear")
    f.get("rope.scaling.finetuned")
    factor = f.number("rope.scaling.factor", 0.0, 1e6, 0.0) or f.number("rope.scale_linear", 0.0, 1e6, 0.0)
    original = f.integer("rope.scaling.original_context_length", 0, MAX_POSITIONS, 0)
    if kind == "none" or (kind == "linear" and not factor):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original:
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        scaling |= _yarn(f, factor)
    return scaling


def _yarn(f: Fields, factor: float) -> dict[str, float]:
    """YaRN's fields. llama.cpp's attention factor multiplies YaRN's own 0.1 ln(factor) + 1 instead of replacing it."""
    f.expect("rope.scaling.yarn_ext_factor", 1.0)
    names = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
    found = {name: f.number(key, 0.0, 1e6, 0.0) for name, key in names.items()}
    extra = f.number("rope.scaling.attn_factor", 1e-6, 1e6, 1.0)
    extra *= f.number("rope.scaling.yarn_attn_factor", 1e-6, 1e6, 1.0)
    if extra != 1.0 and factor >= 1.0:
        found["attention_factor"] = extra * (0.1 * log(factor) + 1.0)
    return {name: value for name, value in found.items() if value}


def read_longrope(source: TensorSource, f: Fields) -> dict[str, Any]:
    """LongRoPE's fields. As in llama.cpp, the original context is the full context where the file does not state it.
    Unless the file states the attention factor, it is derived from the two, as for the model folder that the file was
    made from."""
    context = f.integer("context_length", 1, MAX_POSITIONS)
    original = f.integer("rope.scaling.original_context_length", 0, MAX_POSITIONS, 0) or context
    scaling = {
        "rope_type": "longrope",
        "short_factor": read_factors(source, "rope_factors_short.weight"),
        "long_factor": read_factors(source, "rope_factors_long.weight"),
        "original_max_position_embeddings": original,
    }
    if f.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = f.number("rope.scaling.attn_factor", 1e-6, 1e6)
    return scaling


def read_factors(source: TensorSource, name: str) -> list[float]:
    """A tensor with one divisor per frequency. For Llama 3's scaling, the converter computes them."""
    if name not in source.names():
        raise ModelFileError(f"the GGUF file has no tensor {name}", "is the file complete?")
    shape = source.info(name).shape
    if math.prod(shape) > MAX_WIDTH:
        raise ModelFileError(f"{name} has shape {shape}", "expected one number per frequency")
    return source.array(name).flatten().tolist()


def read_pooling(f: Fields) -> dict[str, Any]:
    """`pooling` as `kvasir.models.pooling` reads it; empty if the file leaves it to the model's default."""
    number = f.get("pooling_type")
    if number is None:
        return {}
    if type(number) is not int or number not in _POOLING:
        raise UnsupportedModel(f"{f.where}: pooling_type is {number!r}", f"supported: {_POOLING}")
    return {"pooling": {"kind": _POOLING[number], "normalize": True}}


def read_vocab_size(f: Fields, shapes: Shapes) -> int:
    rows = rows_of(shapes, "token_embd.weight")
    if f.integer("vocab_size", 1, MAX_VOCAB, rows) != rows:
        raise ModelFileError(f"{f.where}: vocab_size is {f.get('vocab_size')}", f"token_embd has {rows} rows")
    return rows


def rows_of(shapes: Shapes, name: str) -> int:
    shape = shapes.get(name, ())
    if len(shape) != 2:
        raise ModelFileError(f"the GGUF file has no matrix {name}", "is the file complete?")
    return shape[0]
