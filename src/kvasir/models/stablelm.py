"""StableLM: a Llama with LayerNorms and rotary embeddings in a quarter of a head; some sizes have parallel blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.block import DecoderLayer
from kvasir.layers.norm import LayerNorm, RMSNorm
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
        f.expect("qk_layernorm", False)
        f.finish()
        return cls(**sizes, windows=(0,) * sizes["num_layers"], qkv_bias=bias, parallel=parallel)


class StableLM(Llama):
    """A Llama with LayerNorms."""

    Config = StableLMConfig
    Norm: ClassVar[type[RMSNorm]] = LayerNorm

    def _block(self, layer: int, c: Any) -> DecoderLayer:
        block = super()._block(layer, c)
        if c.parallel:
            block.parallel, block.mlp_norm = True, None
        return block
