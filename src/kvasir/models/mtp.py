"""Heads for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layers after a decoder's own that read
its last hidden rows and the embeddings of the next tokens, and predict the tokens after these. They only draft: an
answer does not depend on them. The table of embeddings is the decoder's, and unless the layers have their own, that of
logits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.caches import CacheKind, Shared
from kvasir.errors import UnsupportedModel
from kvasir.layers.draft import DraftLayer
from kvasir.layers.kv_layout import Spec
from kvasir.layers.linear import Head
from kvasir.layers.module import Entry, Module
from kvasir.models.decoder import Decoder, within
from kvasir.models.drafting import TARGET

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch


class MultiTokenHead(Module):
    """The layers for multi-token prediction of one decoder. Their caches follow the decoder's own in `cache_spec`."""

    prefix = ""
    ignored: Iterable[str] = (r".*",)  # the decoder has used the rest of the checkpoint

    def __init__(self, model: Decoder):
        drafting = model.drafting
        if drafting is None:
            raise UnsupportedModel(f"{type(model).__name__} has no layers for multi-token prediction in its config")
        self.drafting = drafting
        whole = type(model)(drafting.config)
        self._whole, self._names = (whole,), whole.names()  # in a tuple: its other modules are not the head's
        added = whole.layers[model.config.num_layers :]
        eps, width = model.config.norm_eps, model.config.width
        norms = ((model.Norm(width, eps), model.Norm(width, eps), model.Norm(width, eps)) for _ in added)
        heads = (Head(width, model.config.vocab_size) if drafting.head else None for _ in added)
        parts = zip(added, norms, heads, strict=True)
        layers = [DraftLayer(block, own, drafting.hidden_first, head) for block, own, head in parts]
        self.layers: list[DraftLayer | None] = [*(None,) * drafting.first, *layers]
        self.count = len(layers)

    def draft(
        self, model: Decoder, layer: int, tokens_T: Tensor, hidden_TD: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """One layer's prediction.

        model: the decoder. layer: from 0. tokens: int64 [T], the token after each row's. hidden: float32 [T, D], of the
        decoder (`Drafting.tap`), or carried from the layer before. Returns the rows for `logits`, and those for the
        next layer, both float32 [T, D].
        """
        step = self.layers[self.drafting.first + layer]
        assert step is not None
        embedded_TD = model.embed(tokens_T)
        if model.embed_scale != 1.0:
            embedded_TD = embedded_TD * model.embed_scale
        rows_TD = step(embedded_TD, hidden_TD, batch)
        normed_TD = step.norm(rows_TD)
        return normed_TD, normed_TD if self.drafting.carries_normed else rows_TD

    def logits(self, model: Decoder, layer: int, hidden_RD: Tensor) -> Tensor:
        """Of rows that `draft` gave for the layer."""
        step = self.layers[self.drafting.first + layer]
        return step.head(hidden_RD) if step and step.head else model.logits(hidden_RD)

    def cache_spec(self) -> tuple[CacheKind, ...]:
        """The kinds of the caches of the decoder's layers, as if they were not split over ranks, then of these."""
        return self._whole[0].cache_spec()

    def names(self) -> Mapping[str, Entry]:
        """As `Decoder.names`."""
        d, own = self.drafting, "layers.*."
        blocks = {
            f"layers.*.block.{path.removeprefix(own)}": self._renamed(entry)
            for path, entry in self._names.items()
            if path.startswith(own)
        }
        parts = {"joint": d.joint, "embed_norm": d.embed_norm, "hidden_norm": d.hidden_norm, "norm": d.norm}
        parts |= {"head": d.head} if d.head else {}
        return {**blocks, **{own + part: name for part, name in parts.items()}}

    def _renamed(self, entry: Entry) -> Entry:
        for prefix in ("model.language_model.layers.*.", "model.layers.*."):
            entry = within(entry, prefix, self.drafting.layer)
        for old, new in self.drafting.renamed.items():
            entry = within(entry, self.drafting.layer + old, self.drafting.layer + new)
        return entry


class MultiTokenDraft:
    """A decoder's head as a DraftModel. Each of its layers drafts an id; the last is applied again to what it carries,
    for each further one."""

    ahead = 1
    advances = True
    target_ids: np.ndarray | None = None
    draft_ids: np.ndarray | None = None

    def __init__(self, model: Decoder, head: MultiTokenHead):
        self.model, self.head = model, head
        self.taps: tuple[str, ...] = (head.drafting.tap,)
        self.width = model.config.width
        self.depth, self.chained = head.count, head.drafting.chained

    @property
    def context_length(self) -> int:
        """The decoder's."""
        return self.model.config.context_length

    def cache_spec(self) -> Spec:
        """The caches of the head's layers, numbered after the decoder's."""
        own = self.model.cache_spec()
        return (*(Shared(layer, TARGET) for layer in range(len(own))), *self.head.cache_spec()[len(own) :])

    def join(self, taps_TX: Tensor) -> Tensor:
        """The decoder's hidden rows as they are."""
        return taps_TX

    def forward(self, tokens_T: Tensor, rows_TD: Tensor | None, batch: Batch, layer: int = 0) -> tuple[Tensor, Tensor]:
        """As `MultiTokenHead.draft`."""
        assert rows_TD is not None
        return self.head.draft(self.model, layer, tokens_T, rows_TD, batch)

    def logits(self, hidden_RD: Tensor, layer: int = 0) -> Tensor:
        """As `MultiTokenHead.logits`."""
        return self.head.logits(self.model, layer, hidden_RD)

    def parts(self) -> tuple[Any, ...]:
        """The head."""
        return (self.head,)
