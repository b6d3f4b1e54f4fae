"""Converts the metadata of encoders in GGUF files to the `config.json` that our classes read.

XLM-RoBERTa's converter writes `general.architecture` bert: it drops the rows of the table of positions that no position
uses, so that the first token has position 0, as in BERT.
"""

from __future__ import annotations

from typing import Any

from kvasir.models.config import MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields
from kvasir.models.gguf_fields import Shapes, read_pooling, read_vocab_size, rows_of


def _sizes(f: Fields, shapes: Shapes) -> dict[str, Any]:
    f.expect("attention.causal", False)
    return {
        "vocab_size": read_vocab_size(f, shapes),
        "hidden_size": f.integer("embedding_length", 1, MAX_WIDTH),
        "intermediate_size": f.integer("feed_forward_length", 1, MAX_WIDTH),
        "num_hidden_layers": f.integer("block_count", 1, MAX_LAYERS),
        "num_attention_heads": f.integer("attention.head_count", 1, MAX_HEADS),
        "max_position_embeddings": f.integer("context_length", 1, MAX_POSITIONS),
        "type_vocab_size": rows_of(shapes, "token_types.weight"),
        "layer_norm_eps": f.number("attention.layer_norm_epsilon", 0.0, 1.0),
    } | read_pooling(f)


def _bert(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    return _sizes(f, shapes) | {"model_type": "bert", "hidden_act": "gelu"}


def _nomic_bert(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    theta = f.number("rope.freq_base", 1.0, 1e12, 10000.0)
    return _sizes(f, shapes) | {"model_type": "nomic_bert", "rope_theta": theta}


READERS = {"bert": _bert, "nomic-bert": _nomic_bert}
