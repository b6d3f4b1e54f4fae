"""EuroBERT (arXiv:2503.05500): a Llama whose tokens attend to the whole text, without logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from kvasir.layers.linear import Plain
from kvasir.layers.mlp import ACTIVATIONS
from kvasir.layers.module import Entry
from kvasir.models.config import Fields
from kvasir.models.llama import Llama, LlamaConfig
from kvasir.models.pooling import HeadShape, Pooling, pooling_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

_DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
_POOLINGS = {"bos": "cls", "mean": "mean", "late": "late"}


@dataclass(frozen=True, slots=True)
class EuroBertConfig(LlamaConfig):
    """classifier_pooling: which row a classifier gets, as in `Pooling`; with "late" its dense layer comes before
    pooling."""

    classifier_pooling: str = "late"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> EuroBertConfig:
        """Reads a `config.json`. Raises ModelFileError for bad values, UnsupportedModel for features without code."""
        named = ("clf_pooling", "classifier_pooling")  # in the authors' configs, in those of transformers
        f = Fields(config)
        pooling = f.choice(named[0], tuple(_POOLINGS), f.choice(named[1], tuple(_POOLINGS), "late"))
        rest = {name: value for name, value in config.items() if name not in named}
        found = super(EuroBertConfig, cls).from_hf({**_DEFAULTS, **rest, "tie_word_embeddings": False})
        return replace(found, pooling=pooling_of(config, Pooling("mean")), classifier_pooling=_POOLINGS[pooling])


class EuroBert(Llama):
    """A bidirectional Llama. late: the classifier's dense layer where it comes before pooling."""

    Config = EuroBertConfig
    config: EuroBertConfig
    bidirectional: ClassVar[bool] = True

    def __init__(self, config: EuroBertConfig):
        super().__init__(config)
        is_late = self.pooler.classifier is not None and config.classifier_pooling == "late"
        self.late = Plain(config.width, config.width, bias=True) if is_late else None

    def classifier(self) -> HeadShape:
        """The classifier over the row that `classifier_pooling` names."""
        kind = self.config.classifier_pooling
        return (
            HeadShape("classifier", kind="mean")
            if kind == "late"
            else HeadShape("classifier", "dense", "gelu", "", kind)
        )

    def forward(self, tokens_T: Tensor, batch: Batch) -> Tensor:
        """Float32 [T, D]: the hidden rows after the last norm or, in a late classifier, after its dense layer."""
        x_TD = super().forward(tokens_T, batch)
        return x_TD if self.late is None else ACTIVATIONS["gelu"](self.late(x_TD, batch))

    def names(self) -> Mapping[str, Entry]:
        """The name table of `Decoder.names`, with the layer before pooling."""
        return {**super().names(), "late": "dense"}
