"""Gemma 3, text (arXiv:2503.19786): Gemma 2 with normalised heads instead of capped scores. Five of six layers have a
sliding window and a rotary embedding of their own. EmbeddingGemma (arXiv:2509.20354) attends in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.caches import Around, CacheKind, PagedKV
from kvasir.errors import ModelFileError
from kvasir.layers.rope import Rope, RopeScaling
from kvasir.models.config import MAX_LAYERS, Fields
from kvasir.models.gemma2 import Gemma2, Gemma2Config, read_gemma
from kvasir.models.rope import read_rope

# Published configs omit fields that equal these.
_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


@dataclass(frozen=True, slots=True)
class Gemma3Config(Gemma2Config):
    """local_theta, local_scaling: the rotary embedding of the sliding-window layers. With bidirectional attention they
    attend to as many tokens on both sides as half a window has."""

    local_theta: float = 1e4
    local_scaling: RopeScaling = field(default_factory=RopeScaling)

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence; `max_position_embeddings` already includes the scaling factor."""
        return self.max_position

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma3Config:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        full, local = split_rope(config)
        bidirectional = Fields(config).flag("use_bidirectional_attention", False)
        f = Fields({**_DEFAULTS, **full, "use_bidirectional_attention": False})
        settings = read_gemma(f, Fields(config).integer("sliding_window_pattern", 1, MAX_LAYERS, 6))
        f.get("sliding_window_pattern")
        f.expect("attn_logit_softcapping", None)
        local["rope_theta"] = f.number("rope_local_base_freq", 1.0, 1e12, 1e4)
        theta, scaling = read_rope(Fields(local), settings["max_position"])
        f.finish()
        if bidirectional and 1 in settings["windows"]:
            raise ModelFileError(f"{f.where}: sliding_window is 1", "expected at least 2 in both directions")
        settings["bidirectional"] = bidirectional
        return cls(**settings, head_norm=True, local_theta=theta, local_scaling=scaling)


def split_rope(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config with the rotary settings of the full-attention layers in their usual place, and the settings of the
    sliding-window layers.

    The new format has an object for each of the two in `rope_parameters`; the old format has only a theta for the
    sliding-window layers.
    """
    both = config.get("rope_parameters")
    if both is None:
        return dict(config), {}
    if not isinstance(both, Mapping) or not both.keys() <= {"full_attention", "sliding_attention"}:
        raise ModelFileError("config.json: rope_parameters is not one object for each kind of layer")
    full, local = both.get("full_attention"), both.get("sliding_attention")
    return {**config, "rope_parameters": full}, {"rope_parameters": local}


class Gemma3Text(Gemma2):
    """Gemma 2's blocks with two rotary embeddings: one for the full-attention layers, one for the sliding-window
    layers."""

    Config = Gemma3Config
    config: Gemma3Config

    def __init__(self, config: Gemma3Config):
        self.local_rope = Rope(config.rotary_dim, config.local_theta, config.local_scaling)
        super().__init__(config)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The kind of KV cache of each layer."""
        c = self.config
        if not c.bidirectional:
            return super().cache_spec()
        sizes = c.kv_heads, c.head_dim
        return tuple(Around(*sizes, distance=w // 2) if w > 1 else PagedKV(*sizes) for w in c.windows)

    def _rope_of(self, layer: int) -> Rope:
        return self.local_rope if self.config.windows[layer] else self.rope
