"""Mistral (arXiv:2310.06825): Llama whose layers may all have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.models.config import MAX_POSITIONS, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

_DEFAULT_WINDOW = 4096  # if the field is absent; null means no window


@dataclass(frozen=True, slots=True)
class MistralConfig(DecoderConfig):
    """The sizes and settings of a Mistral; all layers have the same window."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MistralConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes = read_sizes(f, kv_heads=8)
        absent = 0 if "sliding_window" in config else _DEFAULT_WINDOW
        window = f.integer("sliding_window", 1, MAX_POSITIONS, absent)
        f.finish()
        return cls(**sizes, windows=(window,) * sizes["num_layers"])


class Mistral(Llama):
    """A Llama with the windows of its config."""

    Config = MistralConfig
