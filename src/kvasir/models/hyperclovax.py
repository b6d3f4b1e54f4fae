"""HyperCLOVA X: a Granite with norms after attention and the MLP, too; its logits are multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.block import DecoderLayer
from kvasir.layers.module import Entry
from kvasir.models.config import Fields
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama


@dataclass(frozen=True, slots=True)
class HyperClovaXConfig(DecoderConfig):
    """The sizes and settings of a HyperCLOVA X. post_norms: whether norms follow attention and the MLP."""

    post_norms: bool = True

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> HyperClovaXConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes, bias = read_sizes(f), f.flag("attention_bias", False)
        settings = {
            "embed_scale": f.number("embedding_multiplier", 1e-6, 1e6, 1.0),
            "attn_scale": f.number("attention_multiplier", 1e-6, 1e6, sizes["head_dim"] ** -0.5),
            "residual_scale": f.number("residual_multiplier", 1e-6, 1e6, 1.0),
            "logit_scale": f.number("logits_scaling", 1e-6, 1e6, 1.0),
            "mlp_bias": f.flag("mlp_bias", False),
            "post_norms": f.flag("use_post_norm", True),
        }
        f.finish()
        return cls(**sizes, **settings, windows=(0,) * sizes["num_layers"], qkv_bias=bias, out_bias=bias)


class HyperClovaX(Llama):
    """A Llama with multipliers and four norms per block."""

    Config = HyperClovaXConfig
    norms: ClassVar[tuple[str, ...]] = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")

    def _block(self, layer: int, c: Any) -> DecoderLayer:
        block = super()._block(layer, c)
        if not c.post_norms:
            block.attn_post_norm = block.mlp_post_norm = None
        return block

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the norms after attention and the MLP."""
        layer = "model.layers.*."
        norms = {"layers.*.attn_post_norm": layer + "post_norm1", "layers.*.mlp_post_norm": layer + "post_norm2"}
        return {**super().names(), **norms}
