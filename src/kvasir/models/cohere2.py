"""Command A and R7B (Cohere 2): attention and MLP in parallel after one LayerNorm without a bias, scaled logits, and
windows with rotary embeddings of neighbouring pairs in three of four layers; the others have neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvasir.layers.module import Entry
from kvasir.layers.norm import PlainLayerNorm, RMSNorm
from kvasir.models.config import MAX_LAYERS, MAX_POSITIONS, Fields, read_sliding_layers
from kvasir.models.decoder import DecoderConfig, read_sizes
from kvasir.models.llama import Llama
from kvasir.models.rope import halves

_DEFAULTS = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 4096, "logit_scale": 0.0625}


@dataclass(frozen=True, slots=True)
class Cohere2Config(DecoderConfig):
    """The sizes and settings of a Cohere 2."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Cohere2Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields({**_DEFAULTS, **config})
        sizes, bias = read_sizes(f, eps="layer_norm_eps"), f.flag("attention_bias", False)
        layers, every = sizes["num_layers"], f.integer("sliding_window_pattern", 1, MAX_LAYERS, 4)
        window = f.integer("sliding_window", 1, MAX_POSITIONS)
        slides = read_sliding_layers(f, layers) or tuple((i + 1) % every != 0 for i in range(layers))
        scale = f.number("logit_scale", 1e-6, 1e6)
        f.expect("use_qk_norm", False)
        f.expect("use_parallel_block", True)
        f.expect("use_embedding_sharing", True)
        f.expect("use_gated_activation", True)
        f.expect("position_embedding_type", "rope_gptj")
        for name in ("rotary_pct", "order_of_interleaved_layers", "layer_switch", "cache_implementation"):
            f.get(name)  # transformers does not read them
        f.finish()
        return cls(
            **sizes,
            windows=tuple(window if sliding else 0 for sliding in slides),
            rotates=tuple(slides),
            qkv_bias=bias,
            out_bias=bias,
            logit_scale=scale,
        )


class Cohere2(Llama):
    """A Llama whose attention and MLP read the same normalised rows."""

    Config = Cohere2Config
    Norm: ClassVar[type[RMSNorm]] = PlainLayerNorm
    norms: ClassVar[tuple[str, ...]] = ("attn_norm",)
    parallel: ClassVar[bool] = True

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the rows of q and k in the order of our rotary embedding."""
        c = self.config
        return {**super().names(), **halves("model.layers.*.self_attn.", c.head_dim, c.rotary_dim)}
