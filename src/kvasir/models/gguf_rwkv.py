"""RWKV-7 in GGUF files: the metadata as the `config.json` that our class reads.

Source: llama.cpp's converter of RWKV-7 and its loader. The number of heads in the file is 0: it follows from their
width.
"""

from __future__ import annotations

from typing import Any

from kvasir.models.config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Fields
from kvasir.models.gguf_fields import Shapes, read_vocab_size

_RANKS = {"decay": "decay", "a": "iclr", "v": "value_residual_mix", "gate": "gate"}


def _rwkv7(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    f.get("attention.head_count")  # 0, since llama.cpp does not read it
    f.expect("token_shift_count", 2)
    f.expect("rescale_every_n_layers", 0)
    ranks = {f"{ours}_low_rank_dim": f"attention.{name}_lora_rank" for ours, name in _RANKS.items()}
    return {
        "model_type": "rwkv7",
        "vocab_size": read_vocab_size(f, shapes),
        "hidden_size": f.integer("embedding_length", 1, MAX_WIDTH),
        "intermediate_size": f.integer("feed_forward_length", 1, MAX_WIDTH),
        "num_hidden_layers": f.integer("block_count", 1, MAX_LAYERS),
        "head_dim": f.integer("wkv.head_size", 1, MAX_HEAD_DIM),
        "max_position_embeddings": f.integer("context_length", 1, MAX_POSITIONS),
        "norm_eps": f.number("attention.layer_norm_epsilon", 0.0, 1.0),
        "norm_bias": "blk.0.attn_norm.bias" in shapes,
        "norm_first": "token_embd_norm.weight" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        **{ours: f.integer(name, 1, MAX_WIDTH) for ours, name in ranks.items()},
    }


READERS = {"rwkv7": _rwkv7}
