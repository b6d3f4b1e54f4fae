"""An ordinary decoder that drafts for another, with its own vocabulary or the target's. With another vocabulary, it
drafts the tokens whose text both have (token-level intersection: arXiv:2502.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.errors import ConfigError
from kvasir.layers.kv_layout import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

MIN_COMMON = 100  # tokens that both vocabularies must have: with fewer, hardly any draft is right


class SmallerModel:
    """A decoder as a DraftModel. It reads ids only and carries nothing but its cache.

    shared: int32 [target vocabulary], the draft model's id of the same token, -1 where it has none; None if equal ids
    are the same token. unknown: the id that stands for a token that the draft model lacks. Raises ConfigError if the
    vocabularies have too little in common.
    """

    taps: tuple[str, ...] = ()
    ahead = 0
    advances = True
    width = 0
    depth, chained = 1, True

    def __init__(self, model: Any, target_vocab: int, shared: np.ndarray | None = None, unknown: int = 0):
        self.model = model
        vocab = model.config.vocab_size
        self.target_ids: np.ndarray | None = None
        self.draft_ids: np.ndarray | None = None
        if shared is None and vocab == target_vocab:
            return
        if shared is None:  # one of them is padded
            shared = np.arange(target_vocab, dtype=np.int32)
        shared = np.where((shared >= 0) & (shared < vocab), shared, -1).astype(np.int32)
        common = np.flatnonzero(shared >= 0)
        if len(common) < min(MIN_COMMON, vocab, target_vocab):
            raise ConfigError(
                f"the draft model has {len(common)} tokens in common with the model, at least {MIN_COMMON} are needed",
                "choose a draft model with the same or a similar tokenizer",
            )
        self.draft_ids = np.where(shared >= 0, shared, unknown if 0 <= unknown < vocab else 0).astype(np.int32)
        self.target_ids = ids = np.full(vocab, -1, np.int32)
        ids[shared[common[::-1]]] = common[::-1]  # of several, the first

    @property
    def context_length(self) -> int:
        """As `DraftModel.context_length`."""
        return self.model.config.context_length

    def cache_spec(self) -> Spec:
        """The decoder's own."""
        return self.model.cache_spec()

    def join(self, taps_TX: Tensor) -> Tensor:
        """There is nothing to join."""
        raise AssertionError("a model that reads ids only has no taps")

    def forward(self, tokens_T: Tensor, rows_TD: Tensor | None, batch: Batch, layer: int = 0) -> tuple[Tensor, None]:
        """The decoder's forward."""
        return self.model.forward(tokens_T, batch), None

    def logits(self, hidden_RD: Tensor, layer: int = 0) -> Tensor:
        """The decoder's logits, float32 [R, its vocabulary]."""
        return self.model.logits(hidden_RD)

    def parts(self) -> tuple[Any, ...]:
        """The decoder."""
        return (self.model,)
