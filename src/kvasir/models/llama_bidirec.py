"""NVIDIA's bidirectional Llama (llama-nemotron-embed and -rerank): each token attends to the whole text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvasir.models.config import Fields
from kvasir.models.llama import Llama, LlamaConfig
from kvasir.models.pooling import HeadShape, Pooling, pooling_of
from kvasir.types import Task

_POOLINGS = {"avg": "mean", "cls": "cls", "last": "last"}


@dataclass(frozen=True, slots=True)
class LlamaBidirecConfig(LlamaConfig):
    """kind: which row a classifier gets, as in `Pooling`."""

    kind: str = "mean"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaBidirecConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        f, rest = Fields(config), dict(config)
        kind = "mean"
        if isinstance(config.get("pooling"), str):  # the authors' field; a folder's own modules have another form
            kind = _POOLINGS[f.choice("pooling", tuple(_POOLINGS))]
            del rest["pooling"]
        pooling = pooling_of(rest, Pooling(kind))
        if pooling.task is Task.CLASSIFY:
            f.expect("temperature", 1.0)  # divides the logits
        found = super(LlamaBidirecConfig, cls).from_hf(
            {name: value for name, value in rest.items() if name not in ("temperature", "is_causal")}
        )
        return replace(found, pooling=pooling, kind=kind, bidirectional=True)


class LlamaBidirec(Llama):
    """A Llama that attends in both directions."""

    Config = LlamaBidirecConfig
    config: LlamaBidirecConfig

    def classifier(self) -> HeadShape:
        """The classifier over the pooled row."""
        return HeadShape("score", kind=self.config.kind, out_bias=False)
