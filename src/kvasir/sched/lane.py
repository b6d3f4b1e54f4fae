"""The lane: running sequences that only decode, with their counts in columns, so that a step needs no object per row.

    Counts of a Sequence  --enter-->  columns of the lane  --leave-->  Counts

A sequence's counts are kept in one place at a time. In the lane, its `counts` are a read-only view of its row; it has
to leave the lane before one of them changes. All sequences of the lane compute a token in the same steps. A sequence
leaves the lane when something concerns it alone (its last token, a stop id, an error, a preemption).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvasir.kv.manager import KVManager
from kvasir.plan import Decodes
from kvasir.sched.counts import Counts
from kvasir.sched.sequence import Sequence, Status
from kvasir.types import ServiceClass

COUNTS = ("known", "computed", "stored", "in_flight", "turn", "since")
LEAST = 8  # sequences; for fewer, columns cost more than one object each
_WHOLE = ("known", "computed", "stored", "in_flight", "turn", "room", "trim", "max_known")


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The sequences of the lane until the next one enters or leaves, in the order of entry. rows: [S] int32. appends:
    their `tokens.append`. ids: of their requests. shares: number of sequences per class and tenant. stop_ids: the union
    of their stop ids, sorted, int64. predicted: whether the answer of one of them is."""

    sequences: tuple[Sequence, ...]
    rows: np.ndarray
    appends: tuple[Callable[[int], None], ...]
    ids: tuple[str, ...]
    indexes: tuple[int, ...]
    shares: Counter[tuple[ServiceClass, str]]
    stop_ids: np.ndarray
    predicted: bool

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> Members:
        """The members for these sequences."""
        found = tuple(sequences)
        stop_ids = frozenset[int]().union(*{s.stop_ids for s in found})
        return cls(
            found,
            np.array([s.row for s in found], np.int32),
            tuple([s.tokens.append for s in found]),
            tuple([s.request.id for s in found]),
            tuple([s.index for s in found]),
            Counter([share_of(s) for s in found]),
            np.array(sorted(stop_ids), np.int64),
            any(s.request.prediction for s in found),
        )

    def without(self, places: list[int]) -> Members:
        """The members except those at these places."""
        left = set(places)
        return Members.of(seq for place, seq in enumerate(self.sequences) if place not in left)


class RowCounts(Counts):
    """Read-only view of the counts of a sequence in the lane."""

    __slots__ = ("_lane", "_row")

    def __init__(self, lane: Lane, row: int):
        self._lane, self._row = lane, row


def _column(name: str) -> property:
    return property(lambda counts: counts._lane.count(counts._row, name))


for _name in COUNTS:
    setattr(RowCounts, _name, _column(_name))
RowCounts.drafted = property(lambda counts: 0)  # type: ignore[assignment]  # drafted sequences are not in the lane


class Lane:
    """Owns the counts of its sequences. max_rows: rows of the runner. least: the smallest number of decoding sequences
    for which the lane is used."""

    def __init__(self, max_rows: int):
        self._columns = {name: np.zeros(max_rows, np.int32) for name in _WHOLE} | {"since": np.zeros(max_rows)}
        self._sequences: dict[int, Sequence] = {}  # by row
        self._members: Members | None = None  # None when the sequences have changed
        self.least = LEAST
        self.open = True  # whether sequences may enter

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def members(self) -> Members:
        """The sequences that are in the lane now."""
        if self._members is None:
            self._members = Members.of(self._sequences.values())
        return self._members

    def __contains__(self, seq: Sequence) -> bool:
        return self._sequences.get(seq.row) is seq

    def count(self, row: int, name: str) -> Any:
        """A count of the sequence in a row of the lane."""
        return self._columns[name][row].item()

    # -- entering and leaving ----------------------------------------------------------------------------------

    def offer(self, seq: Sequence) -> None:
        """Lets a sequence that got a token enter if it only decodes from here on."""
        if self.open and decodes_only(seq):
            counts = seq.counts
            room, trim = seq.blocks.room(counts.computed), seq.blocks.next_trim(counts.stored)
            for name in COUNTS:
                self._columns[name][seq.row] = getattr(counts, name)
            for name, value in (("room", room), ("trim", trim), ("max_known", seq.max_known)):
                self._columns[name][seq.row] = value
            self._sequences[seq.row], self._members, seq.counts = seq, None, RowCounts(self, seq.row)

    def leave(self, seq: Sequence) -> None:
        """Gives the sequence its own counts again; does nothing if it is not in the lane."""
        if seq in self:
            seq.counts = Counts(**{name: self.count(seq.row, name) for name in COUNTS})
            seq.emission.plan(seq.counts.known)
            del self._sequences[seq.row]
            self._members = None

    def dissolve(self) -> None:
        """Takes all sequences out of the lane."""
        for seq in list(self._sequences.values()):
            self.leave(seq)

    def part(self) -> None:
        """Takes out the sequences whose next token is their last."""
        if not self:
            return
        rows = self.members.rows
        ending = rows[self._columns["known"][rows] + 1 >= self._columns["max_known"][rows]]
        for row in ending.tolist():
            self.leave(self._sequences[row])

    # -- steps -------------------------------------------------------------------------------------------------

    @property
    def short(self) -> int:
        """Number of sequences that need a new block for their next token."""
        return int((self._columns["room"][self.members.rows] == 0).sum()) if self else 0

    @property
    def context(self) -> int:
        """Sum of the known tokens of all sequences in the lane."""
        return int(self._columns["known"][self.members.rows].sum()) if self else 0

    def advance(self, kv: KVManager, turn: int) -> Decodes:
        """Plans one more token for every sequence; enough blocks must be available. turn: number of the step."""
        columns, rows = self._columns, self.members.rows
        starts = columns["computed"][rows]
        blocks: list[tuple[int, int, int, int]] = []
        for place in np.flatnonzero(columns["room"][rows] == 0).tolist():
            seq, end = self.members.sequences[place], int(starts[place]) + 1
            added = kv.extend(seq.blocks, end)
            blocks += [(place, group, index, id) for group, (index, ids) in enumerate(added) for id in ids]
            columns["room"][seq.row] = seq.blocks.room(end - 1)
        for name in ("known", "computed", "in_flight"):
            columns[name][rows] += 1
        columns["room"][rows] -= 1
        columns["turn"][rows] = turn
        return Decodes(rows.tobytes(), starts.tobytes(), tuple(blocks))

    def odd(self, members: Members, tokens: np.ndarray) -> list[int]:
        """Places of the members of a step that must be committed one by one: they have left the lane since, have failed
        (token -1), or got a stop id. tokens: [S] int32."""
        odd = set[int]()
        if members is not self._members:
            odd.update(place for place, seq in enumerate(members.sequences) if seq not in self)
        odd.update(np.flatnonzero(tokens < 0).tolist())
        stops = np.flatnonzero(np.isin(tokens, members.stop_ids)).tolist() if members.stop_ids.size else ()
        odd.update(place for place in stops if int(tokens[place]) in members.sequences[place].stop_ids)
        return sorted(odd)

    def take(self, rows: np.ndarray, now: float) -> None:
        """Commits a token of each row: the keys and values that its step computed are stored."""
        columns = self._columns
        columns["in_flight"][rows] -= 1
        columns["stored"][rows] = stored = columns["computed"][rows] - columns["in_flight"][rows]
        columns["since"][rows] = now
        for row in rows[stored >= columns["trim"][rows]].tolist():
            seq = self._sequences[row]
            seq.blocks.trim(seq.counts.stored)
            columns["trim"][row] = seq.blocks.next_trim(seq.counts.stored)

    def check(self) -> None:
        """Raises AssertionError."""
        for row, seq in self._sequences.items():
            assert seq.row == row and seq.status is Status.RUNNING, "a sequence in the lane does not belong there"
            counts = seq.counts
            assert isinstance(counts, RowCounts), "a sequence is counted in two places"
            assert len(seq.tokens) == counts.known - counts.in_flight, "tokens are miscounted"
            assert counts.computed == counts.known - 1, "steps are miscounted"
            assert counts.stored == counts.computed - counts.in_flight, "steps are miscounted"
            assert self._columns["room"][row] == seq.blocks.room(counts.computed), "a block is miscounted"
            trim, most = self._columns["trim"][row], seq.blocks.next_trim(counts.stored)
            assert counts.stored < trim <= max(most, counts.stored + seq.blocks.block_size), (
                "a block outside the window is kept"
            )


def share_of(seq: Sequence) -> tuple[ServiceClass, str]:
    """The class and tenant that a sequence is charged to."""
    return seq.request.slo, seq.request.tenant


def decodes_only(seq: Sequence) -> bool:
    """Whether a running sequence only decodes from now on, and its steps have nothing to handle but the sampled id."""
    spec, guided = seq.spec, seq.guidance
    return (
        seq.status is Status.RUNNING
        and not isinstance(seq.counts, RowCounts)
        and seq.counts.known == seq.counts.computed + 1 < seq.max_known
        and seq.counts.stored >= seq.prompt_len
        and len(seq.tokens) - seq.prompt_len >= spec.min_tokens
        and not (seq.counts.drafted or seq.suspect or seq.carry or spec.carries)
        and not (guided.guide or guided.compiling or guided.pending_forced or guided.unplanned_ids)
        and not (seq.emission.holds_back or seq.emission.unemitted or seq.to_read)
    )


def tokens_of(data: bytes) -> np.ndarray:
    """Packed ids as an int32 array."""
    return np.frombuffer(data, np.int32)
