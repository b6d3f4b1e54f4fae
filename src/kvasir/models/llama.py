"""Llama 1 to 3 and models of the same architecture (arXiv:2302.13971, arXiv:2407.21783).

Mistral, Qwen2 and Qwen3 are this model with other settings; their files read their configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvasir.errors import UnsupportedModel
from kvasir.layers.attention import Attention
from kvasir.layers.block import DecoderLayer, Mixer
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.layers.moe import MoE
from kvasir.layers.rope import Rope
from kvasir.models.config import MAX_LAYERS, Fields
from kvasir.models.decoder import Decoder, DecoderConfig, read_sizes
from kvasir.models.drafting import Drafting, ignored_after, longer, numbered_after


@dataclass(frozen=True, slots=True)
class LlamaConfig(DecoderConfig):
    """The sizes and settings of a Llama. drafting: its layers for multi-token prediction, in DeepSeek-V3's form."""

    drafting: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes = read_sizes(f, both_ways=True)
        attention_bias, mlp_bias = f.flag("attention_bias", False), f.flag("mlp_bias", False)
        drafting = f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
        f.finish()
        return cls(
            **sizes, windows=(0,) * sizes["num_layers"], qkv_bias=attention_bias, out_bias=attention_bias,
            mlp_bias=mlp_bias, drafting=drafting,
        )  # fmt: skip


class Llama(Decoder):
    """A decoder with rotary embeddings and gated MLPs. norms: those of a block, as `DecoderLayer` names them."""

    Config = LlamaConfig
    norms: ClassVar[tuple[str, ...]] = ("attn_norm", "mlp_norm")
    parallel: ClassVar[bool] = False

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        if config.bidirectional and any(config.windows) and type(self).cache_spec is Llama.cache_spec:
            raise UnsupportedModel("config.json: is_causal is false, and layers have sliding windows",
                                   "supported: one of the two")  # fmt: skip
        self.layers = [self._block(i, config) for i in range(config.num_layers)]

    @property
    def drafting(self) -> Drafting | None:
        """As `Decoder.drafting`."""
        count = self._drafting
        return numbered_after(self.config.num_layers, longer(self.config, count, windows=0)) if count else None

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Decoder.ignored`, and the layers for multi-token prediction, which `MultiTokenHead` reads."""
        return (*super().ignored, *ignored_after(self.config.num_layers, self._drafting))

    @property
    def _drafting(self) -> int:
        """0 for families with configs, and forms of such layers, of their own."""
        return self.config.drafting if isinstance(self.config, LlamaConfig) else 0

    def _block(self, layer: int, c: DecoderConfig) -> DecoderLayer:
        norms = dict.fromkeys(("attn_norm", "mlp_norm")) | {name: self._norm() for name in self.norms}
        attn, mlp = self._mixer(layer, c), self._mlp(layer, c)
        return DecoderLayer(attn=attn, mlp=mlp, **norms, parallel=self.parallel, scale=c.residual_scale)

    def _mixer(self, layer: int, c: Any) -> Mixer:
        """The part of a layer that mixes information across tokens. Families with recurrent layers override it."""
        return Attention(layer, c.width, c.heads, c.kv_heads, c.head_dim, **self._attention_options(layer, c))

    def _attention_options(self, layer: int, c: Any) -> dict[str, Any]:
        return {
            "rope": self._rope_of(layer),
            "bias": c.qkv_bias,
            "out_bias": c.out_bias,
            "head_norm_eps": c.norm_eps if c.head_norm else None,
            "head_norm": self.Norm,
            "scale": c.attn_scale,
            "clip": c.qkv_clip,
        }

    def _rope_of(self, layer: int) -> Rope | None:
        rotates = self.config.rotates
        return self.rope if not rotates or rotates[layer] else None

    def _mlp(self, layer: int, c: Any) -> GatedMLP | MLP | MoE:
        """The part of a layer that follows attention. Families with experts override it."""
        return GatedMLP(c.width, c.inner, c.act, c.mlp_bias)
