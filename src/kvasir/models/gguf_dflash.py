"""GGUF files of DFlash and DSpark drafters (architecture dflash): their metadata as a `config.json`.

A file has the target's tokenizer, also the id of the mask, and no tables that the drafter shares with the target. Its
`target_layers` are the layers whose inputs are read, one more than the layers of `target_layer_ids`. Source:
llama.cpp's `src/models/dflash.cpp` and its converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.models.config import MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, Fields
from kvasir.models.dflash_config import MAX_BLOCK
from kvasir.models.eagle3_config import MAX_TAPS
from kvasir.models.gguf_fields import Shapes, read_decoder, read_layer_types
from kvasir.models.registry import DFLASH

_OTHERS = ("selector_hidden.weight", "context_norm.weight", "d2t")  # of other drafters of blocks


def _dflash(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    if other := next((name for name in _OTHERS if name in shapes), None):
        raise UnsupportedModel(
            f"{f.where}: a drafter of blocks with the tensor {other}", "supported: those with the tensors of DFlash"
        )
    width = f.integer("embedding_length", 1, MAX_WIDTH)
    f.expect("hyper_connection_count", 0)
    f.get("rope.dimension_sections")  # those of a target with several: the drafter has one
    if "token_embd.weight" not in shapes:
        shapes = {**shapes, "token_embd.weight": (f.integer("vocab_size", 1, MAX_VOCAB), width)}
    config = read_decoder(f, shapes)
    window = f.integer("attention.sliding_window", 0, MAX_POSITIONS, 0)
    layers = config["num_hidden_layers"]
    sliding = {"sliding_window": window, "layer_types": read_layer_types(f, layers, 1)} if window else {}
    return config | sliding | {
        "model_type": "qwen3",
        "architectures": [DFLASH[0]],
        "tie_word_embeddings": False,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "use_sliding_window": bool(window),
        "is_causal": f.get("attention.causal"),
        "block_size": f.integer("block_size", 2, MAX_BLOCK, 16),
        "target_layer_ids": _layer_ids(f),
        "target_hidden_size": f.integer("target_hidden_size", 1, MAX_WIDTH, width),
        "mask_token_id": f.get("mask_token_id"),
        "sample_from_anchor": f.flag("sample_from_anchor", "markov_w1.weight" in shapes),
        **_heads(shapes, width),
        "output_multiplier": f.get("logit_scale"),
        "final_logit_softcapping": f.get("final_logit_softcapping"),
    }  # fmt: skip


def _heads(shapes: Shapes, width: int) -> dict[str, Any]:
    """The fields of DSpark's heads, from their tensors: the file has no keys for them."""
    if "markov_w1.weight" not in shapes:
        return {}
    rank = shapes["markov_w1.weight"][-1:] or (0,)
    sure = shapes.get("conf_proj.weight", ())
    return {
        "markov_rank": rank[0],
        "markov_head_type": "vanilla",
        "enable_confidence_head": bool(sure),
        "confidence_head_with_markov": bool(sure) and sure[-1] != width,
    }


def _layer_ids(f: Fields) -> list[int]:
    given = f.get("target_layers")
    given = [given] if type(given) is int else given  # a list of equal numbers is read as one
    if not isinstance(given, list) or len(given) > MAX_TAPS or any(type(i) is not int or i < 1 for i in given):
        raise ModelFileError(
            f"{f.where}: target_layers is {quoted(given)}", f"expected at most {MAX_TAPS} layers from 1 on"
        )
    return [i - 1 for i in given]


def with_vocabulary(metadata: Mapping[str, Any], architecture: str) -> Mapping[str, Any]:
    """The metadata with what a drafter's reader takes from the tokenizer: the number of ids and that of the mask."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    own = {
        f"{architecture}.mask_token_id": metadata.get("tokenizer.ggml.mask_token_id"),
        f"{architecture}.vocab_size": len(tokens) if isinstance(tokens, list) else None,
    }
    return {**{name: value for name, value in own.items() if value is not None}, **metadata}


READERS = {"dflash": _dflash}
