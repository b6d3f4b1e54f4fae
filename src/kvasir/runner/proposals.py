"""Guesses the next ids of rows with a model that drafts (`models.drafting`), after a step has been sampled.

The draft model follows the rows of the runner with caches of its own. It computes what it lacks of a row's known ids,
then continues from its own guesses, for all rows that ask together:

    known      ... a b|             b has just been sampled
    lacking      . . .              positions that the draft model has not computed; the last gives the first guess
    rounds            c, d, e       each computed at the position of the guess before it, beyond the known ids

A guess is drawn by the target's own sampler with the noise of its position (Gumbel-max coupling): where both models
have the same distribution, the target draws the same id. Nothing that a row's results depend on is written: the ids
beyond the known ones are overwritten before they count, and the draft model's caches are read by it alone. So whatever
goes wrong here costs guesses, never results.

A head reads hidden rows of the target (`DraftModel.taps`), which exist only until the next step. Those of rows that do
not ask wait until there are LAG of them, so that drafts that no request takes cost little.

Where the forward draws on a device, an id that the host does not need yet stays there (LATER takes its place) and is
read by the next round. All of them come to the host at once, after the last round. Only then do stop ids and errors end
a draft: what was computed after these was in vain.

If a head has several layers, each computes what is lacking in turn and gives a guess. Layer i embeds the ids i places
further on, so its last i positions depend on guesses: their hidden rows are kept, and they are computed again.

    layer 0    . . a b              at the same four positions, of which b has just been sampled
    layer 1    . a b c              c is the guess of layer 0, d that of layer 1
    rounds           d, ...         by the last layer, each one position later
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvasir.layers.rows import RowArrays
from kvasir.models.drafting import DraftModel
from kvasir.plan import Ahead, CacheGroup
from kvasir.runner.executor import ExecutorStep, Taken
from kvasir.runner.rows import Row, Rows

Array = Any  # NumPy's, or a tensor of the forward
LAG = 16  # hidden rows of a row of the runner that wait at most
MAX_DRAWN = 32  # rows of logits at a time
LATER = -1  # in place of a guess that only the device knows


class Span(NamedTuple):
    """Positions [start, start + count) of a row, as a piece of a step of the draft model."""

    row: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


class Draw(NamedTuple):
    """A guess to be drawn: the id at position `known` of the row, after the ids before it. mask: int32 words of the
    allowed ids, None for all. waits: whether the host needs the id before the next one is drawn."""

    row: Row
    known: int
    carry: bytes
    mask: np.ndarray | None = None
    waits: bool = True


class DraftForward(Protocol):
    """Computes the draft model on an executor. at: places of spans in the last step. seconds: of its kernels, added
    up."""

    max_tokens: int
    seconds: float

    def bind(self, rows: RowArrays, ahead: int) -> None:
        """Sets the rows, whose ids it embeds `ahead` positions early."""
        ...

    def enter(self, row: int) -> None:
        """Another sequence has taken the row."""
        ...

    def taps(self, first: int, count: int) -> Array:
        """The outputs that the draft model reads, of these token rows of the target's last step, float32 [count, X]."""
        ...

    def run(self, spans: Sequence[Span], taps: Array | None, rows: Array | None, layer: int = 0) -> None:
        """Computes a step of a layer, from the target's outputs [T, X], from carried rows [T, width], or without both
        from ids only; then a layer after the first reads all rows that the last step, of the same spans, has
        carried."""
        ...

    def logits(self, at: Sequence[int]) -> Array:
        """Of the last position of each span, float32 [n, draft vocabulary], until the next call."""
        ...

    def carried(self, at: Sequence[int]) -> Array:
        """The row that each span's last position carries, float32 [n, width]; a copy."""
        ...

    def draw(self, logits: Array, draws: Sequence[Draw]) -> Sequence[Taken | None]:
        """Samples as the target does. logits: float32 [n, vocabulary]. None for an id that does not wait and is not
        on the host yet: it is embedded where the next `run` finds LATER."""
        ...

    def collect(self) -> Sequence[Taken]:
        """Waits for what `draw` gave None for since the last call, in this order."""
        ...


@dataclass(slots=True)
class Guesses:
    """The guesses for one row. at: of its work in the step. begin: the first position that the step has sampled. known:
    of the row. position: the last one computed. mask: of the next guess. later: places of the ids in what
    `DraftForward.collect` will give; of all or of none."""

    at: int
    row: Row
    wanted: int
    begin: int
    known: int
    position: int
    carry: bytes
    ids: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)
    carried: Array | None = None
    mask: np.ndarray | None = None


@dataclass(slots=True)
class _Lacking:
    """Positions to compute. taps: float32 [count, X], for a head. guesses: to begin when they are computed."""

    row: Row
    start: int
    count: int
    taps: Array | None = None
    guesses: Guesses | None = None


class Proposer:
    """Drafts for the rows of a runner. vocab: the target's. groups, block_size: of the caches. most_positions: rows
    with more known ids get no guesses. positions: the same, or as many as the draft model has. seconds: that kernels
    took for the last guesses."""

    seconds = 0.0

    def __init__(
        self, draft: DraftModel, forward: DraftForward, groups: Sequence[CacheGroup], block_size: int, vocab: int,
        most_positions: int | None = None,
    ):  # fmt: skip
        self.draft, self.forward = draft, forward
        self.positions = min(draft.context_length, most_positions or draft.context_length)
        self._groups, self._block_size, self._vocab = groups, block_size, vocab
        self._common = None if draft.target_ids is None else np.flatnonzero(draft.target_ids >= 0)
        self._ahead = draft.ahead + draft.depth - 1  # of the ids that the last layer embeds

    def bind(self, rows: Rows) -> None:
        """Sets the rows; called once."""
        self._rows, arrays = rows, rows.arrays
        self._copies = self.draft.draft_ids is not None or not self.draft.advances
        assert self.draft.depth == 1 or (self.draft.taps and not self._copies), "several layers read the row's ids"
        if self._copies:
            arrays = replace(arrays, ids=np.zeros_like(arrays.ids))
        self._ids = arrays.ids  # in the draft model's vocabulary
        self.forward.bind(arrays, self.draft.ahead)
        self._done = np.full(len(arrays.ids), -1, np.int64)  # first position not computed; -1: the next step's start
        self._waiting: list[list[Array]] = [[] for _ in arrays.ids]  # hidden rows from there on
        self._guessed: list[list[int]] = [[] for _ in arrays.ids]  # ids from there on that were computed as guesses

    def enter(self, row: int) -> None:
        """A sequence has taken the row."""
        self._done[row] = -1
        self._waiting[row], self._guessed[row] = [], []
        self.forward.enter(row)

    def begin(self, step: ExecutorStep) -> None:
        """A step begins. What a new sequence has before it is in the cache, computed for another sequence."""
        if step.decodes:
            rows, starts = (np.frombuffer(column, np.int32) for column in (step.decodes.rows, step.decodes.starts))
            new = self._done[rows] < 0
            self._done[rows[new]] = starts[new]
        for work in step.works:
            if self._done[work.row] < 0:
                self._done[work.row] = work.start

    def waits(self, step: ExecutorStep) -> bool:
        """Whether anything is to be computed after a step, before the next one begins."""
        if self.draft.taps:  # hidden rows are kept even where nothing is asked for
            return bool(step.works or step.decodes)
        return any(work.propose or work.count > 1 + work.drafted for work in step.works)

    def propose(self, step: ExecutorStep, ahead: Ahead | None = None) -> dict[int, tuple[int, ...]]:
        """The guesses for works that ask for them, by place. The rows have taken the step's ids. ahead: the masks of
        guesses."""
        begun, self._masks, self._num_later = self.forward.seconds, ahead, 0
        lacking = list(self._heads(step) if self.draft.taps else self._smaller(step))
        done: list[Guesses] = []
        self._go_on(list(self._catch_up(lacking, done)), done)
        self._settle(done)
        self.seconds = self.forward.seconds - begun
        return {guesses.at: tuple(guesses.ids) for guesses in done if guesses.ids}

    def _go_on(self, open_: list[Guesses], done: list[Guesses]) -> None:
        """Guesses on, one id of each at a time."""
        while open_:
            spans = [Span(guesses.row.number, guesses.position, 1) for guesses in open_]
            rows = self._stacked([guesses.carried for guesses in open_]) if self.draft.width else None
            self.forward.run(spans, None, rows, self.draft.depth - 1)
            open_ = [guesses for _, guesses in self._drawn(list(enumerate(open_)), done)]

    # -- what is lacking

    def _heads(self, step: ExecutorStep) -> Iterator[_Lacking]:
        """Of a head: positions whose hidden rows and next ids exist, up to the last one of a row that asks."""
        for place, (row, start) in enumerate(_columns(step)):
            yield from self._kept(self._rows[row], start, 1, place, None)
        for at, work in enumerate(step.works):
            row = self._rows[work.row]
            count = 0 if work.want_pooled else min(work.end, row.known - self.draft.ahead) - work.start
            yield from self._kept(row, work.start, count, step.starts[at], self._asked(step, at, row))

    def _kept(self, row: Row, start: int, count: int, first: int, guesses: Guesses | None) -> Iterator[_Lacking]:
        if count <= 0 or row.fault or row.known > self.positions:
            return
        if not self.draft.advances:  # it has no caches to bring up to date
            last = start + count - 1
            if guesses and self._fits(row, last, last + 1):
                yield _Lacking(row, last, 1, self.forward.taps(first + count - 1, 1), guesses)
            return
        waiting = self._waiting[row.number]
        waits = self._wait(row, start, self.forward.taps(first, count))
        if guesses or waits > LAG:
            taps = self._joined(waiting)
            begin, end = int(self._done[row.number]), start + count
            final = min(max(begin, row.known - self.draft.depth), end)  # the rest embeds guesses
            waiting[:] = [self._joined([taps[final - begin :]])] if final < end else []
            self._done[row.number] = final
            if self._fits(row, begin, end):
                yield _Lacking(row, begin, len(taps), taps, guesses)

    def _wait(self, row: Row, start: int, taps: Array) -> int:
        """Lets hidden rows from `start` on wait. Returns how many of the row wait now."""
        waiting = self._waiting[row.number]
        if self._done[row.number] + sum(map(len, waiting)) != start:  # the result of a step in between was not taken
            waiting.clear()
            self._done[row.number] = start
        waiting.append(taps)
        return sum(map(len, waiting))

    def _smaller(self, step: ExecutorStep) -> Iterator[_Lacking]:
        """Of a model that reads ids only: all positions of rows that ask, and prompts as the target computes them. What
        more a row lacks is computed in several steps, so that none takes long."""
        room = self.forward.max_tokens
        for at, work in enumerate(step.works):
            row = self._rows[work.row]
            if row.known > self.positions:
                continue
            guesses = self._asked(step, at, row)
            end = row.known if guesses else work.end if work.count > 1 + work.drafted else 0
            if row.fault or work.want_pooled or (start := self._known_guesses(row, end)) >= end:
                continue
            count = min(end - start, work.count + 1 + room)
            room -= max(0, count - work.count - 1)
            if self._fits(row, start, start + count):
                self._done[row.number] = start + count
                yield _Lacking(row, start, count, None, guesses if start + count == end else None)

    def _known_guesses(self, row: Row, end: int) -> int:
        """The first position that is not computed: those of right guesses are. The last one is computed again if all
        are, for its logits."""
        done = int(self._done[row.number])
        for token in self._guessed[row.number]:
            if done + 1 >= end or row.ids[done] != token:
                break
            done += 1
        if end:
            self._done[row.number], self._guessed[row.number] = done, []
        return done

    def _asked(self, step: ExecutorStep, at: int, row: Row) -> Guesses | None:
        work = step.works[at]
        position = row.known - 1 - self.draft.ahead
        if not work.propose or not work.sample or row.fault or position < 0 or row.known >= len(row.ids):
            return None
        return Guesses(at, row, work.propose, work.end - work.drafted, row.known, position, row.carry)

    def _fits(self, row: Row, start: int, end: int) -> bool:
        """Whether the row's tables have the blocks that a span reads and writes."""
        if end > min(self.positions, len(row.ids) - self._ahead):
            return False
        for group, table, filled in zip(self._groups, row.tables, row.filled, strict=True):
            low, high = group.kind.low(start), -(-end // self._block_size)
            if high > filled or not table[low // self._block_size : high].all():
                return False
        return True

    # -- computing

    def _catch_up(self, lacking: Sequence[_Lacking], done: list[Guesses]) -> Iterator[Guesses]:
        """Computes what is lacking, in as many steps as it takes. Returns the guesses to go on with."""
        open_ = list(lacking)
        while open_:
            part, room = [], self.forward.max_tokens
            while open_ and room:
                count = min(room, open_[0].count)
                part.append((open_[0], count))
                room -= count
                if count < open_[0].count:
                    break
                open_.pop(0)
            spans = [Span(item.row.number, item.start, count) for item, count in part]
            for span in spans:
                self._translate(self._rows[span.row], span.start, span.end)
            taps = [item.taps[:count] for item, count in part if item.taps is not None]
            ended = []
            for place, (item, count) in enumerate(part):
                item.start, item.count = item.start + count, item.count - count
                item.taps = None if item.taps is None else item.taps[count:]
                if not item.count and item.guesses:
                    ended.append((place, item.guesses))
            yield from self._through(spans, self._joined(taps) if taps else None, ended, done)

    def _through(
        self, spans: Sequence[Span], taps: Array | None, drawing: list[tuple[int, Guesses]], done: list[Guesses]
    ) -> Iterator[Guesses]:
        """Computes the spans in each layer. Returns the guesses to go on with."""
        for layer in range(self.draft.depth):
            self.forward.run(spans, taps if not (layer and self.draft.chained) else None, None, layer)
            drawing = self._drawn(drawing, done)
        return (guesses for _, guesses in drawing)

    def _translate(self, row: Row, start: int, end: int) -> None:
        """Writes the ids that the draft model embeds at these positions, unless they are the row's."""
        if self._copies:
            part = slice(start + self.draft.ahead, end + self.draft.ahead)
            self._ids[row.number, part] = self._own(row.ids[part])

    def _own(self, ids: np.ndarray) -> np.ndarray:
        """The draft model's ids."""
        return ids if self.draft.draft_ids is None else np.where(ids == LATER, LATER, self.draft.draft_ids[ids])

    def _drawn(self, drawing: Sequence[tuple[int, Guesses]], done: list[Guesses]) -> list[tuple[int, Guesses]]:
        """Draws a guess for each of these spans, by their places. Returns those that go on; adds the others to `done`,
        unless they have no guess."""
        drawing = [one for one in drawing if self._may_go_on(one[1], done)]
        if not drawing:
            return []
        places, found, going = [place for place, _ in drawing], [], []
        for first in range(0, len(places), MAX_DRAWN):
            part = drawing[first : first + MAX_DRAWN]
            logits = self._of_target(self.forward.logits(places[first : first + MAX_DRAWN]))
            draws = [
                Draw(one.row, one.known + len(one.ids), one.carry, one.mask, self._has_masks(one.row))
                for _, one in part
            ]
            found += self.forward.draw(logits, draws)
        carried = self.forward.carried(places) if self.draft.width else [None] * len(places)
        for (place, guesses), taken, row in zip(drawing, found, carried, strict=True):
            guesses.carried = row
            if self._take(guesses, taken):
                going.append((place, guesses))
            elif guesses.ids:
                done.append(guesses)
        return going

    def _may_go_on(self, guesses: Guesses, done: list[Guesses]) -> bool:
        """Sets the mask of the next guess. If it allows no id, the guesses end."""
        if self._masks is None or not self._has_masks(guesses.row):
            return True
        row, known = guesses.row, guesses.known + len(guesses.ids)
        mask = self._masks(row.number, row.ids[guesses.begin : known].tolist())
        if mask == b"":
            done += [guesses] if guesses.ids else []
            return False
        guesses.mask = None if mask is None else np.frombuffer(mask, np.int32)
        return True

    def _has_masks(self, row: Row) -> bool:
        return self._masks is not None and row.spec.guided

    def _joined(self, parts: Sequence[Array]) -> Array:
        """A copy of rows of several taps, one after another."""
        return np.concatenate(parts)

    def _stacked(self, rows: Sequence[Array]) -> Array:
        """Carried rows, [n, width]."""
        return np.stack(rows)

    def _of_target(self, logits_nv: Array) -> Array:
        """Logits of the target's ids, -inf for those that the draft model lacks."""
        if self._common is None or self.draft.target_ids is None:
            return logits_nv
        wide = np.full((len(logits_nv), self._vocab), -np.inf, np.float32)
        wide[:, self.draft.target_ids[self._common]] = logits_nv[:, self._common]
        return wide

    def _take(self, guesses: Guesses, taken: Taken | None) -> bool:
        """Adds a drawn id. Returns whether there will be another."""
        if taken is None:
            guesses.later.append(self._num_later)
            self._num_later += 1
            taken = Taken((LATER,), (), guesses.carry)
        if taken.error and (token := _only(guesses.mask)) is not None:
            taken = Taken((token,), (), guesses.carry)  # the draft model lacks the one that is allowed
        if taken.error:
            return False
        row, (token,) = guesses.row, taken.tokens
        at = guesses.known + len(guesses.ids)
        guesses.ids.append(token)
        guesses.carry = taken.carry
        if len(guesses.ids) >= self.draft.depth:
            guesses.position += self.draft.advances
        ends = len(guesses.ids) == guesses.wanted or token in row.spec.stop_ids
        if ends or at + 1 >= len(row.ids) or not self._fits(row, guesses.position, guesses.position + 1):
            return False
        row.ids[at] = token
        if self.draft.advances:
            self._translate(row, guesses.position, guesses.position + 1)
        else:
            self._ids[row.number, guesses.position + self.draft.ahead] = self._own(row.ids[at : at + 1])[0]
        if not self.draft.taps:
            self._guessed[row.number].append(token)
        return True

    def _settle(self, done: Sequence[Guesses]) -> None:
        """Replaces LATER by the ids, up to an error or a stop id."""
        found = self.forward.collect() if self._num_later else ()
        for guesses in done:
            if not guesses.later:
                continue
            row, known, computed = guesses.row, guesses.known, self._guessed[guesses.row.number]
            drawn = [found[place] for place in guesses.later]
            row.ids[known : known + len(drawn)] = [0 if one.error else one.tokens[0] for one in drawn]
            guesses.ids = list(_until_end(drawn, row.spec.stop_ids))
            computed[:] = guesses.ids[: len(computed)]


def _until_end(drawn: Sequence[Taken], stop_ids: Collection[int]) -> Iterator[int]:
    """The ids before an error, up to a stop id."""
    for one in drawn:
        if one.error:
            return
        yield one.tokens[0]
        if one.tokens[0] in stop_ids:
            return


def _only(mask: np.ndarray | None) -> int | None:
    """The only id that a mask allows, if there is one."""
    allowed = () if mask is None else np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[0]) if len(allowed) == 1 else None


def _columns(step: ExecutorStep) -> Iterator[tuple[int, int]]:
    """Row and start of each decode."""
    decodes = step.decodes
    yield from zip(
        np.frombuffer(decodes.rows, np.int32).tolist(), np.frombuffer(decodes.starts, np.int32).tolist(), strict=True
    )
