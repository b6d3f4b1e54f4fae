"""LFM2 in GGUF files: the tensors' names, and the metadata as the `config.json` that our class reads.

Source: llama.cpp's converter of LFM2 and its loader. A file states which layers are convolutions by their number of KV
heads, 0, and holds the inner width of the MLPs as it is.
"""

from __future__ import annotations

from typing import Any

from kvasir.errors import ModelFileError
from kvasir.models.config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Fields
from kvasir.models.gguf_fields import Shapes, read_decoder, read_expert_counts

_SIGMOID = 2  # llama.cpp's number of the gating function


def read_kv_heads(f: Fields) -> list[int]:
    """The number of KV heads of each layer, 0 for one without attention. Afterwards `f` has the greatest of them as the
    number for all layers, at least 1."""
    layers, given = f.integer("block_count", 1, MAX_LAYERS), f.get("attention.head_count_kv")
    given = f.get("attention.head_count") if given is None else given
    heads = given if isinstance(given, list) else [given] * layers
    if len(heads) != layers or not all(type(n) is int and 0 <= n <= MAX_HEADS for n in heads):
        raise ModelFileError(f"{f.where}: attention.head_count_kv is {given!r:.80}",
                             f"expected a number for each of {layers} layers")  # fmt: skip
    f.values = {**f.values, "attention.head_count_kv": max(1, *heads)}
    return heads


def _lfm2(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    heads = read_kv_heads(f)
    config = read_decoder(f, shapes)
    config["norm_eps"] = config.pop("rms_norm_eps")
    config |= {
        "model_type": "lfm2",
        "layer_types": ["full_attention" if n else "conv" for n in heads],
        "conv_L_cache": f.integer("shortconv.l_cache", 1, MAX_WIDTH),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in shapes),
    }
    if architecture == "lfm2":
        return config | {"block_auto_adjust_ff_dim": False}
    f.expect("expert_gating_func", _SIGMOID)
    f.expect("expert_weights_norm", True)
    f.expect("expert_weights_scale", 1.0)
    return config | read_expert_counts(f) | {
        "model_type": "lfm2_moe",
        "moe_intermediate_size": f.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "num_dense_layers": f.integer("leading_dense_block_count", 0, MAX_LAYERS, 0),
        "use_expert_bias": any(".exp_probs_b." in name for name in shapes),
    }  # fmt: skip


READERS = {"lfm2": _lfm2, "lfm2moe": _lfm2}
