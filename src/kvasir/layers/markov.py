"""The heads of DSpark over a drafter of blocks (DeepSeek's DeepSpec, `deepspec/modeling/dspark`): what the id before
adds to the logits of an id, and how sure the drafter is of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.layers.embedding import VocabularyEmbedding
from kvasir.layers.linear import Head, Plain
from kvasir.layers.module import Module
from kvasir.ops.activation import sigmoid, softcap
from kvasir.ops.columns import take_columns
from kvasir.ops.heads import join_heads

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.batch import Batch

KINDS = ("vanilla", "gated", "rnn")


class MarkovHead(Module):
    """A low-rank matrix over pairs of ids: logits += w2(e) with e = w1(the id before).

    vanilla: as it is. gated: e is multiplied by sigmoid(gate([hidden; e])). rnn: a state s, zero before the first id,
    takes its place: a, b, c = joint([s; e; hidden]); s' = sigmoid(a) s + (1 - sigmoid(a)) tanh(b); e' = tanh(c).

    vocab: of the ids before. draft_vocab: number of logits. width: of the hidden rows. kind: of KINDS. confidence:
    whether there is a number of how sure the id is, from the hidden rows and, with `confidence_pairs`, e.
    """

    def __init__(
        self, vocab: int, draft_vocab: int, width: int, rank: int, kind: str, confidence: bool, confidence_pairs: bool
    ):
        self.width, self.rank, self.kind, self.confidence_pairs = width, rank, kind, confidence_pairs
        self.w1, self.w2 = VocabularyEmbedding(vocab, rank), Head(rank, draft_vocab)
        self.gate = Plain(width + rank, rank, True) if kind == "gated" else None
        self.joint = Plain(2 * rank + width, 3 * rank, True) if kind == "rnn" else None
        self.sure = Plain(width + rank * confidence_pairs, 1, True) if confidence else None

    @property
    def state_width(self) -> int:
        """Of the rows that one id leaves to the next."""
        return self.rank if self.kind == "rnn" else 0

    def __call__(self, ids_T: Tensor, rows_TX: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """ids: int64 [T], the ids before. rows: float32 [T, width + state_width], the hidden rows of the ids, and what
        the ids before have left beside them. Returns the rows for `w2`, float32 [T, rank], and what is left: a state,
        then the logit of how sure the id is, both if there are; None without both."""
        pairs_TR, left = self.w1(ids_T), None
        hidden_TD = take_columns(rows_TX, 0, self.width) if self.state_width else rows_TX
        result_TR = pairs_TR
        if self.gate is not None:
            result_TR = sigmoid(self.gate(_beside(hidden_TD, pairs_TR, self.width, self.rank), batch)) * pairs_TR
        if self.joint is not None:
            left, result_TR = self._next(pairs_TR, hidden_TD, rows_TX, batch)
        if self.sure is not None:
            read = _beside(hidden_TD, pairs_TR, self.width, self.rank) if self.confidence_pairs else hidden_TD
            sure_T1 = self.sure(read, batch)
            left = sure_T1 if left is None else _beside(left, sure_T1, self.rank, 1)
        return result_TR, left

    def _next(self, pairs_TR: Tensor, hidden_TD: Tensor, rows_TX: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self.joint is not None
        rank = self.rank
        state_TR = take_columns(rows_TX, self.width, self.width + rank)
        read = _beside(_beside(state_TR, pairs_TR, rank, rank), hidden_TD, 2 * rank, self.width)
        found = self.joint(read, batch)
        gate_TR, new_TR = sigmoid(take_columns(found, 0, rank)), softcap(take_columns(found, rank, 2 * rank), 1.0)
        state_TR = gate_TR * (state_TR + new_TR * -1.0) + new_TR
        return state_TR, softcap(take_columns(found, 2 * rank, 3 * rank), 1.0)


def _beside(a_TA: Tensor, b_TB: Tensor, a: int, b: int) -> Tensor:
    """Both rows, float32 [T, a + b]."""
    return join_heads(a_TA.view(-1, 1, a), b_TB.view(-1, 1, b)).flatten(1)
