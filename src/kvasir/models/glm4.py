"""GLM-4 (arXiv:2406.12793): rotary embeddings of neighbouring pairs in half of a head; since 0414, four norms per
block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.module import Entry, Take
from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama
from kvasir.models.rope import halves, pairs

_DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7}


@dataclass(frozen=True, slots=True)
class Glm4Config(DecoderConfig):
    """The sizes and settings of a GLM-4."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Glm4Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes = read_sizes(f, kv_heads=2, head_dim=128, partial=True)
        bias = f.flag("attention_bias", True)
        f.finish()
        return cls(**sizes, windows=(0,) * sizes["num_layers"], qkv_bias=bias)


class Glm4(Llama):
    """A Llama with four norms per block."""

    Config = Glm4Config
    norms: ClassVar[tuple[str, ...]] = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the additional norms and row ranges of the fused matrix."""
        c, layer = self.config, "model.layers.*."
        return {
            **super().names(),
            **halves(layer + "self_attn.", c.head_dim, c.rotary_dim),
            "layers.*.attn_post_norm": layer + "post_self_attn_layernorm",
            "layers.*.mlp_post_norm": layer + "post_mlp_layernorm",
            "layers.*.mlp.gate_up.gate": Take(layer + "mlp.gate_up_proj", (0, c.inner)),
            "layers.*.mlp.gate_up.up": Take(layer + "mlp.gate_up_proj", (c.inner, 2 * c.inner)),
        }


class Glm(Glm4):
    """A GLM-4 with two norms per block. A GGUF file may hold q, k and v in one matrix."""

    norms: ClassVar[tuple[str, ...]] = ("attn_norm", "mlp_norm")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Glm4.names`, with both forms of the projections."""
        c, attn, order = self.config, "model.layers.*.self_attn.", pairs(self.config.head_dim, self.config.rotary_dim)
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        rows = {"q": ((0, q), order), "k": ((q, q + kv), order), "v": ((q + kv, q + 2 * kv), ())}
        found: dict[str, Entry] = {
            f"layers.*.attn.qkv.{part}": (Take(f"{attn}{part}_proj", order=o), Take(attn + "qkv_proj", run, order=o))
            for part, (run, o) in rows.items()
        }
        return {**super().names(), **found}
