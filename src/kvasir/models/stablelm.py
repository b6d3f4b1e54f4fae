"""StableLM: a Llama with LayerNorms and rotary embeddings in a quarter of a head; some sizes have parallel blocks, and
a norm of its own for each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.attention import Attention
from kvasir.layers.block import DecoderLayer, Mixer
from kvasir.layers.module import Entry
from kvasir.layers.norm import HeadsLayerNorm, LayerNorm, RMSNorm
from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama

_DEFAULTS = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25}


@dataclass(frozen=True, slots=True)
class StableLMConfig(DecoderConfig):
    """The sizes and settings of a StableLM. parallel: whether the MLP reads what attention reads."""

    parallel: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> StableLMConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes = read_sizes(f, kv_heads=32, eps="layer_norm_eps", partial=True)
        parallel, bias = f.flag("use_parallel_residual", False), f.flag("use_qkv_bias", False)
        head_norm = f.flag("qk_layernorm", False)
        f.finish()
        windows = (0,) * sizes["num_layers"]
        return cls(**sizes, windows=windows, qkv_bias=bias, head_norm=head_norm, parallel=parallel)


class StableLM(Llama):
    """A Llama with LayerNorms."""

    Config = StableLMConfig
    Norm: ClassVar[type[RMSNorm]] = LayerNorm
    norms_by_head: ClassVar[bool] = True

    def _mixer(self, layer: int, c: Any) -> Mixer:
        attn = super()._mixer(layer, c)
        if c.head_norm and isinstance(attn, Attention):
            order = tuple(range(c.head_dim))
            attn.q_norm = HeadsLayerNorm(c.heads, c.head_dim, c.norm_eps, order)
            attn.k_norm = HeadsLayerNorm(c.kv_heads, c.head_dim, c.norm_eps, order)
        return attn

    def _block(self, layer: int, c: Any) -> DecoderLayer:
        block = super()._block(layer, c)
        if c.parallel:
            block.parallel, block.mlp_norm = True, None
        return block

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with those of `HeadNormsView`."""
        attn = "model.layers.*.self_attn."
        norms = {f"layers.*.attn.{x}_norm": attn + f"{x}_layernorm" for x in "qk"}
        return {**super().names(), **norms}
