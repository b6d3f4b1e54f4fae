"""The text part of the multimodal Gemma 3 (`Gemma3ForConditionalGeneration`), which is the whole model without
images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvasir.errors import ModelFileError
from kvasir.models.config import Fields
from kvasir.models.gemma3_text import Gemma3Config, Gemma3Text


class Gemma3WholeConfig(Gemma3Config):
    """The config of the text model; the image parts are ignored."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma3Config:
        """Reads `text_config` of a `config.json`. Raises ModelFileError if it is missing."""
        f = Fields(config)
        text, tied = f.get("text_config"), f.flag("tie_word_embeddings", True)
        if not isinstance(text, Mapping):
            raise ModelFileError(f"{f.where}: text_config is missing", "expected the object of the text model")
        f.finish()
        return Gemma3Config.from_hf({**text, "tie_word_embeddings": tied})


class Gemma3(Gemma3Text):
    """`Gemma3Text` under the tensor names of the multimodal checkpoint."""

    Config = Gemma3WholeConfig
    prefix: ClassVar[str] = "language_model."

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of the image tensors and of the duplicates that `Gemma3Text` ignores."""
        text = (f"(language_model\\.)?{pattern}" for pattern in super().ignored)
        return (*text, r"(vision_tower|multi_modal_projector)\..*")
