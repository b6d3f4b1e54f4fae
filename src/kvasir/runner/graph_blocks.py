"""A model that drafts blocks on the graph executor: beside the launches of a `GraphDraft`, those of its Markov head.

rows, chosen      of a block: hidden rows, and the logits of all ids that it gives, in the forward's own memory
rows, chosen      of the Markov head, in each round: what is added to the logits of the next id of each block
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvasir.models.drafting import BlockDraft, DraftModel, drafts_blocks
from kvasir.plan import CacheGroup
from kvasir.runner.block_proposals import BlockProposer
from kvasir.runner.graph_draft import DraftForwards, GraphDraft, GraphProposer, give
from kvasir.runner.graph_executor import GraphExecutor
from kvasir.runner.graph_replays import Record, Replays
from kvasir.runner.proposals import Span


class GraphBlocks(GraphDraft):
    """A BlockForward whose rows and logits are tensors on the device."""

    draft: BlockDraft

    def __init__(self, draft: DraftModel, forwards: DraftForwards, executor: GraphExecutor, record: Record):
        super().__init__(draft, forwards, executor, record)
        most = forwards.max_chosen
        self._markov = Replays(forwards.markov, None, most, most, record) if forwards.markov else None
        self._chosen: list[int] = []  # token rows of the last blocks that give ids

    @property
    def replays(self) -> tuple[Replays, ...]:
        """Of all its launches."""
        return super().replays if self._markov is None else (*super().replays, self._markov)

    def run(self, spans: Sequence[Span], taps: Tensor | None, rows: Tensor | None, layer: int = 0) -> None:
        """As `DraftForward.run`, of a BlockProposer."""
        self._write(spans, 0, both_ways=taps is None and not self.draft.causal)
        if taps is not None:
            self._joined(taps)
            return
        self._layers[0]("rows", sum(span.count for span in spans))
        first, self._chosen = 0, []
        for span in spans:
            self._chosen += range(first + (not self.draft.anchored), first + span.count)
            first += span.count
        self._choose(self._layers[0], self._chosen)

    def logits(self, at: Sequence[int]) -> Tensor:
        """As `DraftForward.logits`, of token rows that give ids."""
        return self.executor.rows.writer.rows(self._logits(), np.searchsorted(self._chosen, at))

    def correct(self, spans: Sequence[Span], at: Sequence[int], states: Sequence[Tensor | None]) -> Tensor | None:
        """As `BlockForward.correct`."""
        head, markov, own = self.draft.markov, self.forwards.markov, self._forward
        assert head is not None and markov is not None and markov.logits is not None and self._markov is not None
        writer = self.executor.rows.writer
        rows = writer.rows(own.value(own.hidden, max(at) + 1), at).float()
        if head.state_width:
            none = rows.new_zeros(head.state_width)
            rows = torch.cat([rows, torch.stack([none if state is None else state for state in states])], 1)
        self._write(spans, 0)
        give(markov, rows)
        self._markov("rows", len(at))
        self._choose(self._markov, range(len(at)))
        writer.add(self._logits(), np.searchsorted(self._chosen, at), markov.value(markov.logits, len(at)))
        return markov.value(markov.exports["carried"], len(at)).clone() if markov.exports else None

    def _choose(self, replays: Replays, rows: Sequence[int]) -> None:
        """Computes the logits of token rows."""
        self.executor.rows.writer.fill(self.forwards.step.chosen[: len(rows)], np.array(rows, np.int32))
        replays("chosen", len(rows))

    def _logits(self) -> Tensor:
        own = self._forward
        assert own.logits is not None
        return own.value(own.logits, len(self._chosen))


class GraphBlockProposer(GraphProposer, BlockProposer):
    """A BlockProposer whose forward is a GraphBlocks."""


def graph_draft(draft: DraftModel, forwards: DraftForwards, executor: GraphExecutor, record: Record) -> GraphDraft:
    """The forward of a draft model beside a model of the graph executor. The others are as of a GraphDraft."""
    return (GraphBlocks if drafts_blocks(draft) else GraphDraft)(draft, forwards, executor, record)


def graph_proposer(
    forward: GraphDraft, groups: Sequence[CacheGroup], block_size: int, vocab: int, most_positions: int | None = None
) -> GraphProposer:
    """What proposes ids with a draft model on the graph executor. The others are as of a Proposer."""
    kind = GraphBlockProposer if drafts_blocks(forward.draft) else GraphProposer
    return kind(forward.draft, forward, groups, block_size, vocab, most_positions)
