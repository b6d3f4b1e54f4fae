"""Guesses with a model that drafts blocks (`models.drafting.BlockDraft`): what differs from other drafters.

    known      ... a b|             b has just been sampled
    lacking      . .                positions whose hidden rows the target has computed: their keys and values are kept
    block            b - - -        one pass over b and as many masks as ids are wanted gives all logits at once
    rounds             c d e        each is drawn after the guesses before it, as other drafters' are

An anchored drafter gives c in the row of b, and so needs one mask less. A Markov head corrects the logits of each id by
the id before, in each round, and its confidence ends a draft that is probably wrong.

The keys and values of a block lie where those of the known ids will. They are overwritten once the target has computed
these positions, and are never read before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvasir.models.drafting import BlockDraft, DraftModel, drafts_blocks
from kvasir.plan import CacheGroup
from kvasir.program.marshal import MAX_CHOSEN
from kvasir.runner.proposals import Array, DraftForward, Guesses, Proposer, Span

LEAST = 0.1  # the chance of being right, with all ids before it, from which an id is worth checking


@dataclass(slots=True)
class _Block:
    """The pass of one row. wanted: ids to draw. count: of its rows. first: the row that gives its first id, among those
    of the step. state: what the last id has left for the next, None at first. chance: that all ids so far are right."""

    guesses: Guesses
    wanted: int
    count: int
    first: int
    state: Array | None = None
    chance: float = 1.0

    @property
    def span(self) -> Span:
        return Span(self.guesses.row.number, self.guesses.known - 1, self.count)


class BlockForward(DraftForward, Protocol):
    """A DraftForward of a BlockDraft. `run` with taps keeps them, and without computes blocks; `logits` are of token
    rows that give ids."""

    def correct(self, spans: Sequence[Span], at: Sequence[int], states: Sequence[Array | None]) -> Array | None:
        """Adds to the logits of these token rows what the ids in the spans, one of each, make of them. states: what the
        ids before have left, None for nothing. Returns what these leave, float32 [n, state and confidence]; None for
        nothing."""
        ...


class BlockProposer(Proposer):
    """A Proposer with a BlockDraft."""

    draft: BlockDraft
    forward: BlockForward

    def _through(
        self, spans: Sequence[Span], taps: Any | None, drawing: list[tuple[int, Guesses]], done: list[Guesses]
    ) -> Iterator[Guesses]:
        self.forward.run(spans, taps, None)
        return (guesses for _, guesses in drawing)

    def _go_on(self, open_: list[Guesses], done: list[Guesses]) -> None:
        for blocks in self._steps(open_):
            self.forward.run([block.span for block in blocks], None, None)
            while blocks:
                if self.draft.markov is not None:
                    blocks = list(self._corrected(blocks, done))
                drawing = [(block.first + len(block.guesses.ids), block.guesses) for block in blocks]
                going = {id(guesses) for _, guesses in self._drawn(drawing, done)}
                blocks = [block for block in blocks if id(block.guesses) in going]

    def _corrected(self, blocks: Sequence[_Block], done: list[Guesses]) -> Iterator[_Block]:
        """Corrects the logits of the next id of each block. Returns those that go on; adds the others to `done`."""
        markov = self.draft.markov
        assert markov is not None
        spans = [Span(b.guesses.row.number, b.guesses.known - 1 + len(b.guesses.ids), 1) for b in blocks]
        at = [block.first + len(block.guesses.ids) for block in blocks]
        left = self.forward.correct(spans, at, [block.state for block in blocks])
        sure = left[:, -1].tolist() if left is not None and markov.sure is not None else []
        for i, block in enumerate(blocks):
            if left is not None:
                block.state = left[i, : markov.state_width]
                if markov.sure is not None:
                    block.chance /= 1.0 + math.exp(min(-sure[i], 700.0))
            if block.chance >= LEAST or not block.guesses.ids:
                yield block
            else:
                done.append(block.guesses)

    def _steps(self, open_: Sequence[Guesses]) -> Iterator[list[_Block]]:
        """The blocks of each pass, whose masks have been written."""
        room, blocks = min(self.forward.max_tokens, MAX_CHOSEN), []
        for guesses in open_:
            if not (wanted := self._most(guesses, room)):
                continue
            guesses.wanted = wanted
            used, count = sum(block.count for block in blocks), wanted + self._unread
            if used + count > room:
                yield blocks
                used, blocks = 0, []
            guesses.row.ids[guesses.known : guesses.known - 1 + count] = self.draft.mask
            blocks.append(_Block(guesses, wanted, count, used + self._unread))
        if blocks:
            yield blocks

    def _most(self, guesses: Guesses, room: int) -> int:
        """How many ids to draw: as many as are wanted and have room in the block, in a step and in the row's tables."""
        row, known = guesses.row, guesses.known
        wanted = min(guesses.wanted, min(self.draft.block, room) - self._unread)
        while wanted and not self._fits(row, known - 1, known - 1 + wanted + self._unread):
            wanted -= 1
        return wanted

    @property
    def _unread(self) -> int:
        """How many rows of a block give no id."""
        return 0 if self.draft.anchored else 1


def proposer_of(
    draft: DraftModel, forward: DraftForward, groups: Sequence[CacheGroup], block_size: int, vocab: int,
    most_positions: int | None = None,
) -> Proposer:  # fmt: skip
    """What proposes ids with a draft model. The others are as of a Proposer."""
    kind = BlockProposer if drafts_blocks(draft) else Proposer
    return kind(draft, forward, groups, block_size, vocab, most_positions)
