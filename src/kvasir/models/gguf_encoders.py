"""Converts the metadata of encoders in GGUF files to the `config.json` that our classes read.

llama.cpp has one `general.architecture`, bert, for BERT, RoBERTa, XLM-RoBERTa and DistilBERT: the converter drops the
rows of the table of positions that no position uses, so that the first token has position 0, as in BERT. Where the
format leaves something open, this follows llama.cpp: `src/models/bert.cpp`, and the pooling RANK of
`src/llama-graph.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.config import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields
from kvasir.models.gguf_fields import Shapes, read_decoder, read_pooling, read_vocab_size, rows_of
from kvasir.models.pooling import Dense, TokenPair

_RANK = 4  # llama.cpp's pooling type of classifiers


def _sizes(f: Fields, shapes: Shapes) -> dict[str, Any]:
    f.expect("attention.causal", False)
    width = f.integer("embedding_length", 1, MAX_WIDTH)
    heads = f.integer("attention.head_count", 1, min(MAX_HEADS, width))
    for key in ("attention.key_length", "attention.value_length"):
        f.expect(key, width // heads)
    f.expect("attention.head_count_kv", heads)
    return {
        "vocab_size": read_vocab_size(f, shapes),
        "hidden_size": width,
        "intermediate_size": f.integer("feed_forward_length", 1, MAX_WIDTH),
        "num_hidden_layers": f.integer("block_count", 1, MAX_LAYERS),
        "num_attention_heads": heads,
        "max_position_embeddings": f.integer("context_length", 1, MAX_POSITIONS),
        "type_vocab_size": rows_of(shapes, "token_types.weight") if "token_types.weight" in shapes else 0,
    }


def _norm(f: Fields) -> dict[str, Any]:
    return {"layer_norm_eps": f.number("attention.layer_norm_epsilon", 0.0, 1.0)}


def _theta(f: Fields, key: str = "rope.freq_base") -> float:
    f.choice("rope.scaling.type", ("none",), "none")
    return f.number(key, 1.0, 1e12, 10000.0)


def _labels(f: Fields, shapes: Shapes, architecture: str) -> dict[str, Any]:
    """The labels of a classifier, whose head the file has as `cls` and `cls.output`; empty if it has none."""
    named = f.get("classifier.output_labels")
    if "cls.output.weight" not in shapes:
        return {}
    if "cls.weight" not in shapes:
        raise UnsupportedModel(
            f"{f.where}: the file has no tensor cls.weight: the converter leaves out the layer before the classifier",
            "use the folder that the file was made from",
        )
    count = rows_of(shapes, "cls.output.weight")
    names = [f"LABEL_{i}" for i in range(count)] if named is None else named
    if isinstance(names, str):  # a list of equal names
        names = [names] * count
    if not isinstance(names, list) or len(names) != count:
        raise ModelFileError(
            f"{f.where}: classifier.output_labels is {names!r}", f"expected the names of {count} labels"
        )
    return {"architectures": [architecture], "id2label": {str(i): name for i, name in enumerate(names)}}


def _pooling(f: Fields, shapes: Shapes, architecture: str) -> dict[str, Any]:
    """What the model is for. architecture: of its classifier."""
    labels = _labels(f, shapes, architecture)
    if f.get("pooling_type") == _RANK and not labels:
        raise UnsupportedModel(f"{f.where}: pooling_type is {_RANK} (RANK)", "the file has no classifier")
    return labels or read_pooling(f)


def token_pair(f: Fields, shapes: Shapes) -> dict[str, Any]:
    """`pooling` of Qwen3-Reranker, whose file has the rows of the logits of "yes" and "no"; empty for other files."""
    if "cls.output.weight" not in shapes:
        return {}
    labels = f.get("classifier.output_labels")
    if labels != ["yes", "no"] or rows_of(shapes, "cls.output.weight") != 2 or f.get("pooling_type") != _RANK:
        raise UnsupportedModel(f"{f.where}: a classifier with the labels {labels!r}", "supported: yes and no, by RANK")
    f.values = {**f.values, "pooling_type": None}
    return {"pooling": TokenPair((0, 1), matrix="cls.output")}


# --- architectures ----------------------------------------------------------------------------------


def _bert(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    found = _sizes(f, shapes) | _norm(f) | {"hidden_act": "gelu"}
    pooling = _pooling(f, shapes, "RobertaForSequenceClassification")
    if "architectures" in pooling:  # RoBERTa's classifier
        return found | pooling | {"model_type": "roberta", "first_position": 0}
    return found | pooling | {"model_type": "bert"}


def _nomic_bert(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    found = _sizes(f, shapes) | _norm(f) | read_pooling(f) | {"model_type": "nomic_bert", "rope_theta": _theta(f)}
    every = f.integer("moe_every_n_layers", 0, MAX_LAYERS, 0)
    if architecture == "nomic-bert":
        f.expect("moe_every_n_layers", 0)
        return found
    experts = f.integer("expert_count", 1, MAX_EXPERTS)
    return found | {
        "activation_function": "gelu",
        "qkv_proj_bias": True,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "moe_every_n_layers": every,
        "num_experts": experts,
        "moe_top_k": f.integer("expert_used_count", 1, experts),
        "moe_bias": False,
    }


def _jina_v2(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    return _sizes(f, shapes) | _norm(f) | read_pooling(f) | {
        "model_type": "jina_bert",
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "separate_gate": "blk.0.ffn_gate.weight" in shapes,
    }  # fmt: skip


def _jina_v3(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    return _sizes(f, shapes) | _norm(f) | read_pooling(f) | {
        "model_type": "jina_embeddings_v3",
        "rope_theta": _theta(f),
        "hidden_act": "gelu",
    }  # fmt: skip


def _modern_bert(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    sizes = _sizes(f, shapes)
    del sizes["type_vocab_size"]
    f.get("attention.layer_norm_epsilon")  # the same as the other
    pooling = _pooling(f, shapes, "ModernBertForSequenceClassification")
    return sizes | pooling | {
        "model_type": "modernbert",
        "norm_eps": f.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "hidden_activation": f.choice("hidden_act", ("gelu", "silu"), "gelu"),
        "local_attention": f.integer("attention.sliding_window", 2, MAX_POSITIONS),
        "global_attn_every_n_layers": f.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, 3),
        "global_rope_theta": _theta(f),
        "local_rope_theta": _theta(f, "rope.freq_base_swa"),
        "classifier_pooling": "mean",  # as in llama.cpp
        "classifier_bias": "cls.bias" in shapes,
    }  # fmt: skip


def _eurobert(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    f.expect("attention.causal", False)
    return read_decoder(f, shapes) | {"model_type": "eurobert"}


def dense_layers(f: Fields, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
    """`pooling` with EmbeddingGemma's layers after pooling, if the file has them."""
    for name in ("dense_2", "dense_3"):
        for key in (f"{name}_feat_in", f"{name}_feat_out"):
            f.get(key)  # as the tensors' shapes say
    found = []
    for name in ("dense_2", "dense_3"):
        if (shape := shapes.get(f"{name}.weight")) is not None:
            if len(shape) != 2:
                raise ModelFileError(f"{name}.weight has shape {list(shape)}", "expected a matrix")
            found.append(Dense(f"{name[-1]}_Dense", shape[1], shape[0], bias=False))
    pooling = {"kind": "mean", "normalize": True, **config.get("pooling", {})}
    return {"pooling": {**pooling, "dense": tuple(found)}}


READERS = {
    "bert": _bert,
    "eurobert": _eurobert,
    "jina-bert-v2": _jina_v2,
    "jina-bert-v3": _jina_v3,
    "modern-bert": _modern_bert,
    "nomic-bert": _nomic_bert,
    "nomic-bert-moe": _nomic_bert,
}
