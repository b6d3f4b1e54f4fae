"""GGUF files of EAGLE-3 heads (architecture eagle3): their metadata as a `config.json`.

A file has no tensors of the tables that a head shares with its target. Its `d2t` holds the target's ids themselves.
Source: llama.cpp's `conversion/llama.py` and `src/models/eagle3.cpp`.
"""

from __future__ import annotations

from typing import Any

from kvasir.models.config import MAX_VOCAB, MAX_WIDTH, Fields
from kvasir.models.eagle3_config import ARCHITECTURES, GGUF_TYPE
from kvasir.models.gguf_fields import Shapes, read_decoder


def _eagle3(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    width = f.integer("embedding_length", 1, MAX_WIDTH)
    # A shared table has the target's size, which vocab_size states.
    table = (
        {} if "token_embd.weight" in shapes else {"token_embd.weight": (f.integer("vocab_size", 1, MAX_VOCAB), width)}
    )
    config = read_decoder(f, {**shapes, **table})
    names = ("target_layers", "extract_layers")  # the second in files of the converter's first version
    draft = shapes.get("d2t") or shapes.get("output.weight") or (config["vocab_size"],)
    return config | {
        "model_type": GGUF_TYPE,
        "architectures": [ARCHITECTURES[1]],
        "tie_word_embeddings": False,
        "draft_vocab_size": draft[0],
        "target_hidden_size": f.integer("target_hidden_size", 1, MAX_WIDTH, width),
        "eagle_aux_hidden_state_layer_ids": next((ids for name in names if (ids := f.get(name)) is not None), None),
        "norm_before_residual": f.flag("norm_before_residual", False),
        "norm_before_fc": f.flag("norm_before_fc", False),
    }


READERS = {"eagle3": _eagle3}
