"""MiMo-7B (arXiv:2505.07608): a Qwen2 with layers for multi-token prediction, which read the target's row before the
embedding of the next token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.models.config import MAX_LAYERS, Fields, read_layer_windows
from kvasir.models.decoder import read_sizes
from kvasir.models.drafting import Drafting, longer
from kvasir.models.qwen2 import Qwen2, Qwen2Config


@dataclass(frozen=True, slots=True)
class MiMoConfig(Qwen2Config):
    """The sizes and settings of a MiMo. drafting: its layers for multi-token prediction."""

    drafting: int = 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MiMoConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f = Fields(config)
        sizes = read_sizes(f, kv_heads=32)
        windows = read_layer_windows(f, sizes["num_layers"])
        f.expect("attention_bias", True)
        drafting = f.integer("num_nextn_predict_layers", 0, MAX_LAYERS, 0)
        f.finish()
        return cls(**sizes, windows=windows, qkv_bias=True, drafting=drafting)


class MiMo(Qwen2):
    """A Qwen2 and its layers for multi-token prediction, which have full attention."""

    Config = MiMoConfig
    config: MiMoConfig

    @property
    def drafting(self) -> Drafting | None:
        """As `Decoder.drafting`."""
        c, layer = self.config, "model.mtp_layers.*."
        if not c.drafting:
            return None
        return Drafting(
            longer(c, c.drafting, windows=0),
            layer,
            0,
            joint=layer + "input_proj",
            embed_norm=layer + "token_layernorm",
            hidden_norm=layer + "hidden_layernorm",
            norm=layer + "final_layernorm",
            hidden_first=True,
        )

    @property
    def ignored(self) -> tuple[str, ...]:
        """As `Decoder.ignored`, and the layers for multi-token prediction."""
        return (*super().ignored, r"model\.mtp_layers\..*")
