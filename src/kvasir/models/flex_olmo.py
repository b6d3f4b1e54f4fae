"""FlexOlmo (arXiv:2507.07024): an OLMo 2 whose MLPs are mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvasir.layers.module import Entry
from kvasir.models.olmo2 import POST_NORMS
from kvasir.models.olmoe import Olmoe, OlmoeConfig
from kvasir.models.qwen3_moe import Qwen3MoeConfig

_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 500000.0, "num_experts": 7, "num_experts_per_tok": 5}


class FlexOlmoConfig(OlmoeConfig):
    """The sizes and settings of a FlexOlmo."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Qwen3MoeConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        return super().from_hf({**_DEFAULTS, **config})


class FlexOlmo(Olmoe):
    """An OLMoE that normalises what attention and the experts add, not what they read."""

    Config = FlexOlmoConfig
    norms: ClassVar[tuple[str, ...]] = ("attn_post_norm", "mlp_post_norm")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Qwen3Moe.names`, with the norms after attention and the experts."""
        return {**super().names(), **POST_NORMS}
