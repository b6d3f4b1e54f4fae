"""The text part of the multimodal Gemma 4 checkpoints, which is the whole model without images and sounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.layers.module import Entry
from kvasir.models.config import Fields
from kvasir.models.decoder import within
from kvasir.models.gemma4_config import Gemma4TextConfig
from kvasir.models.gemma4_text import Gemma4Text


class Gemma4Config(Gemma4TextConfig):
    """The config of the text model; the parts for images and sounds are ignored."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma4TextConfig:
        """Reads `text_config` of a `config.json`. Raises ModelFileError if it is missing."""
        return Gemma4TextConfig.from_hf(text_config(config))


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model in that of a multimodal checkpoint. Raises ModelFileError if it is missing."""
    f = Fields(config)
    text, tied = f.get("text_config"), f.flag("tie_word_embeddings", True)
    if not isinstance(text, Mapping):
        raise ModelFileError(f"{f.where}: text_config is missing", "expected the object of the text model")
    f.finish()
    kind = "gemma4_unified_text" if config.get("model_type") == "gemma4_unified" else "gemma4_text"
    return {"tie_word_embeddings": tied, "model_type": kind, **text}


class Gemma4(Gemma4Text):
    """`Gemma4Text` under the tensor names of the multimodal checkpoint."""

    Config = Gemma4Config

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of unused tensors, including those of the towers for images and sounds."""
        return (*super().ignored, r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\..*")

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Gemma4Text.names`, whose modules lie beside the towers."""
        return {path: within(entry, "model.", "model.language_model.") for path, entry in super().names().items()}
