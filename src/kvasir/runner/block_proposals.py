"""Guesses with a model that drafts blocks (`models.drafting.BlockDraft`): what differs from other drafters.

    known      ... a b|             b has just been sampled
    lacking      . .                positions whose hidden rows the target has computed: their keys and values are kept
    block            b - - -        one pass over b and as many masks as ids are wanted gives all logits at once
    rounds             c d e        each is drawn after the guesses before it, as other drafters' are

The keys and values of a block lie where those of the known ids will. They are overwritten once the target has computed
these positions, and are never read before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.models.drafting import BlockDraft, DraftModel, drafts_blocks
from kvasir.plan import CacheGroup
from kvasir.program.marshal import MAX_CHOSEN
from kvasir.runner.proposals import DraftForward, Guesses, Proposer, Span


@dataclass(slots=True)
class _Block:
    """The pass of one row. first: its first row among those of the step. wanted: ids to draw."""

    guesses: Guesses
    wanted: int
    first: int = 0

    @property
    def span(self) -> Span:
        return Span(self.guesses.row.number, self.guesses.known - 1, 1 + self.wanted)


class BlockProposer(Proposer):
    """A Proposer with a BlockDraft. forward: `run` with taps keeps them, and without computes blocks; `logits` are of
    token rows of the last blocks."""

    draft: BlockDraft

    def _through(
        self, spans: Sequence[Span], taps: Any | None, drawing: list[tuple[int, Guesses]], done: list[Guesses]
    ) -> Iterator[Guesses]:
        self.forward.run(spans, taps, None)
        return (guesses for _, guesses in drawing)

    def _go_on(self, open_: list[Guesses], done: list[Guesses]) -> None:
        for blocks in self._steps(open_):
            self.forward.run([block.span for block in blocks], None, None)
            for i in range(max(block.wanted for block in blocks)):
                drawing = [(block.first + 1 + i, block.guesses) for block in blocks if i < block.wanted]
                going = {id(guesses) for _, guesses in self._drawn(drawing, done)}
                blocks = [block for block in blocks if id(block.guesses) in going]
                if not blocks:
                    break

    def _steps(self, open_: Sequence[Guesses]) -> Iterator[list[_Block]]:
        """The blocks of each pass, whose masks have been written."""
        room, blocks = min(self.forward.max_tokens, MAX_CHOSEN), []
        for guesses in open_:
            if not (wanted := self._most(guesses, room)):
                continue
            guesses.wanted = wanted
            used = sum(block.span.count for block in blocks)
            if used + 1 + wanted > room:
                yield blocks
                used, blocks = 0, []
            guesses.row.ids[guesses.known : guesses.known + wanted] = self.draft.mask
            blocks.append(_Block(guesses, wanted, used))
        if blocks:
            yield blocks

    def _most(self, guesses: Guesses, room: int) -> int:
        """How many ids to draw: as many as are wanted and have room in the block, in a step and in the row's tables."""
        row, known = guesses.row, guesses.known
        wanted = min(guesses.wanted, self.draft.block - 1, room - 1)
        while wanted and not self._fits(row, known - 1, known + wanted):
            wanted -= 1
        return wanted


def proposer_of(
    draft: DraftModel, forward: DraftForward, groups: Sequence[CacheGroup], block_size: int, vocab: int,
    most_positions: int | None = None,
) -> Proposer:  # fmt: skip
    """What proposes ids with a draft model. The others are as of a Proposer."""
    kind = BlockProposer if drafts_blocks(draft) else Proposer
    return kind(draft, forward, groups, block_size, vocab, most_positions)
