"""The text part of the multimodal Gemma 3n checkpoints, which is the whole model without images and sounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.layers.module import Entry
from kvasir.models.decoder import within
from kvasir.models.gemma3n_config import Gemma3nTextConfig
from kvasir.models.gemma3n_text import Gemma3nText
from kvasir.models.gemma4 import text_config


class Gemma3nConfig(Gemma3nTextConfig):
    """The config of the text model; the parts for images and sounds are ignored."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma3nTextConfig:
        """Reads `text_config` of a `config.json`. Raises ModelFileError if it is missing."""
        return Gemma3nTextConfig.from_hf(text_config(config))


class Gemma3n(Gemma3nText):
    """`Gemma3nText` under the tensor names of the multimodal checkpoint."""

    Config = Gemma3nConfig

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, including those of the towers for images and sounds."""
        return (*super().ignored, r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Gemma3nText.names`, whose modules lie beside the towers."""
        return {path: within(entry, "model.", "model.language_model.") for path, entry in super().names().items()}
