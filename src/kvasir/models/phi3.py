"""Phi-3, Phi-3.5 and Phi-4 mini (arXiv:2404.14219): Llama whose checkpoints hold q, k and v in one matrix, gate and up
in another. Only a part of a head may be rotated, and all layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.layers.module import Entry, Take
from kvasir.models.config import MAX_POSITIONS, Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

_DEFAULTS = {"rms_norm_eps": 1e-5}
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Phi3Config(DecoderConfig):
    """The sizes and settings of a Phi-3; all layers have the same window."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Phi3Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **_default_original(config), **config})
        sizes = read_sizes(f, partial=True)
        window = f.integer("sliding_window", 1, MAX_POSITIONS, 0)
        f.expect("attention_bias", False)
        f.expect("full_attn_mod", 1)
        f.expect("interpolate_factor", 1)
        f.finish()
        return cls(**sizes, windows=(window,) * sizes["num_layers"])


def _default_original(config: Mapping[str, Any]) -> dict[str, int]:
    """The default of the original context length, for a config that does not state it. The top-level field takes
    precedence over the one inside the rope settings, so a default must not hide a value inside them."""
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    stated = isinstance(settings, Mapping) and settings.get(_ORIGINAL) is not None
    return {} if stated else {_ORIGINAL: 4096}


class Phi3(Llama):
    """A Llama that reads its projections from the fused matrices of its checkpoint."""

    Config = Phi3Config

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with row ranges of the fused matrices."""
        c, layer = self.config, "model.layers.*."
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        rows = {
            "attn.qkv.q": ("self_attn.qkv_proj", 0, q),
            "attn.qkv.k": ("self_attn.qkv_proj", q, q + kv),
            "attn.qkv.v": ("self_attn.qkv_proj", q + kv, q + 2 * kv),
            "mlp.gate_up.gate": ("mlp.gate_up_proj", 0, c.inner),
            "mlp.gate_up.up": ("mlp.gate_up_proj", c.inner, 2 * c.inner),
        }
        taken = {f"layers.*.{path}": Take(layer + name, (a, b)) for path, (name, a, b) in rows.items()}
        return {**super().names(), **taken}
