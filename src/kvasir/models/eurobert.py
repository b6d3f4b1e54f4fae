"""EuroBERT (arXiv:2503.05500): a Llama whose tokens attend to the whole text, without logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from kvasir.models.config import Fields
from kvasir.models.llama import Llama, LlamaConfig
from kvasir.models.pooling import Pooling, pooling_of
from kvasir.types import Task

_DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True, slots=True)
class EuroBertConfig(LlamaConfig):
    """The sizes and settings of a EuroBERT."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> EuroBertConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        rest = {name: value for name, value in config.items() if name not in ("clf_pooling", "classifier_pooling")}
        found = super(EuroBertConfig, cls).from_hf({**_DEFAULTS, **rest, "tie_word_embeddings": False})
        return replace(found, pooling=pooling_of(Fields(config).values, Pooling("mean")))


class EuroBert(Llama):
    """A bidirectional Llama."""

    Config = EuroBertConfig
    tasks: ClassVar[tuple[Task, ...]] = (Task.EMBED,)
    bidirectional: ClassVar[bool] = True
