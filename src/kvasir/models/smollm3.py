"""SmolLM3: a Llama without a rotary embedding in every fourth layer (arXiv:2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.models.config import MAX_LAYERS, MAX_POSITIONS, Fields, read_sliding_layers
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

_DEFAULTS = {"rope_theta": 2000000.0, "tie_word_embeddings": True}


@dataclass(frozen=True, slots=True)
class SmolLM3Config(DecoderConfig):
    """The sizes and settings of a SmolLM3."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> SmolLM3Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes, bias = read_sizes(f, kv_heads=4), f.flag("attention_bias", False)
        layers = sizes["num_layers"]
        rotates = _read_rotating_layers(f, layers)
        window = f.integer("sliding_window", 1, MAX_POSITIONS, 0) if f.flag("use_sliding_window", False) else 0
        f.get("sliding_window")
        slides = read_sliding_layers(f, layers) or [not rotating for rotating in rotates]
        windows = tuple(window if sliding else 0 for sliding in slides)
        mlp_bias = f.flag("mlp_bias", False)
        f.finish()
        return cls(**sizes, windows=windows, rotates=rotates, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _read_rotating_layers(f: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers have a rotary embedding: those with a 1 in `no_rope_layers`."""
    interval, given = f.integer("no_rope_layer_interval", 1, MAX_LAYERS, 4), f.get("no_rope_layers")
    if given is None:
        return tuple((i + 1) % interval != 0 for i in range(layers))
    if not isinstance(given, list) or len(given) != layers or any(type(i) is not int or i not in (0, 1) for i in given):
        raise ModelFileError(f"{f.where}: no_rope_layers is {given!r:.80}", f"expected {layers} times 0 or 1")
    return tuple(map(bool, given))


class SmolLM3(Llama):
    """A Llama with rotary embeddings in the layers of its config."""

    Config = SmolLM3Config
