"""GGUF files of BitNet: their names, and their metadata as the `config.json` that our class reads."""

from __future__ import annotations

from typing import Any

from kvasir.models.config import Fields
from kvasir.models.gguf_fields import Shapes, read_decoder


def _bitnet(f: Fields, architecture: str, shapes: Shapes) -> dict[str, Any]:
    """As in llama.cpp, a file that names no activation has silu."""
    act = f.choice("hidden_activation", ("relu2", "silu"), "silu")
    bias = any(name.endswith(".attn_q.bias") for name in shapes)
    return read_decoder(f, shapes) | {"model_type": "bitnet", "hidden_act": act, "attention_bias": bias}


READERS = {"bitnet": _bitnet}
