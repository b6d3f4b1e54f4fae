"""Rows: what the runner remembers of each running sequence from joining to leaving."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvasir.inputs import FEATURES, asked
from kvasir.layers.rows import RowArrays
from kvasir.plan import Capacity, Join, SamplingSpec, StepPlan, Work

BROKEN = "an earlier step of this sequence failed"
REFUSED = "this runner cannot compute {}"


@dataclass(slots=True)
class Row:
    """Its arrays are parts of Rows.arrays. ids: int32 [max_model_len + 1], the first `known` are valid. tables: block
    ids per cache group, int32. adapter: the first one's id, 0 for none.

    fault: why nothing is computed for it any more: it asks for what the runner does not have, or a step of it gave an
    error, so that works that were planned meanwhile have nothing to build on. Empty while it is sound.
    """

    spec: SamplingSpec
    prompt_len: int
    ids: np.ndarray
    known: int
    tables: list[np.ndarray]
    adapter: int = 0
    carry: bytes = b""
    filled: list[int] = field(default_factory=list)  # valid entries per table
    fault: str = ""

    def read(self, first: int, end: int) -> tuple[list[int], list[int]]:
        """The ids after the positions [first, end), and how many of the best are wanted beside each."""
        assert end < self.known, "there is no known id behind the last position"
        split = min(max(self.prompt_len - 1 - first, 0), end - first)
        best = [self.spec.prompt_logprobs] * split + [self.spec.logprobs] * (end - first - split)
        return self.ids[first + 1 : end + 1].tolist(), best

    def append(self, token: int) -> None:
        self.ids[self.known] = token
        self.known += 1

    def take(self, work: Work, tokens: tuple[int, ...], carry: bytes) -> None:
        """Ids that a work sampled, in the place of those that it drafted."""
        self.known = work.start + work.count - work.drafted
        for token in tokens:
            self.append(token)
        self.carry = carry


class Rows:
    """Applies plans to rows, which lie in `arrays`. computes: see Executor; what it leaves out is refused by name."""

    def __init__(self, capacity: Capacity, computes: frozenset[str] = frozenset()):
        self._vocab_size = capacity.vocab_size
        longest, groups = capacity.max_model_len, capacity.groups
        blocks = 1 + max(group.kind.blocks(longest, capacity.block_size) for group in groups)
        self.arrays = RowArrays.empty(capacity.max_rows, longest + 1, len(groups), blocks)
        self._computes = computes
        self._rows: list[Row | None] = [None] * capacity.max_rows
        self.adapters: set[int] = {0}  # that the executor has

    def __getitem__(self, row: int) -> Row:
        found = self._rows[row]
        assert found is not None, "work for an empty row"
        return found

    @property
    def used(self) -> int:
        return sum(r is not None for r in self._rows)

    def has(self, place: int, row: Row) -> bool:
        """Whether the row is still that of this place."""
        return self._rows[place] is row

    def apply(self, plan: StepPlan) -> None:
        """Frees, fills and extends rows as the plan says. Raises ValueError for ids outside the vocabulary, which
        kernels would look up without asking, and for jobs of an encoder where there is none; then rows are freed and no
        more."""
        for row in plan.left:
            self._rows[row] = None
        if plan.encodes and "encodes" not in self._computes:
            raise ValueError(REFUSED.format("what an encoder makes (StepPlan.encodes)"))
        for ids in (*(join.ids for join in plan.joined), *(work.appended for work in plan.work if work.appended)):
            self._check(np.frombuffer(ids, np.int32))
        for join in plan.joined:
            assert self._rows[join.row] is None, "a sequence joins in a row that is taken"
            self._rows[join.row] = self._new(join)
        for work in plan.work:
            self._extend(self[work.row], work)
            self[work.row].fault = self[work.row].fault or self._beyond(work)

    def _missing(self, join: Join) -> str:
        """Why the runner cannot take the sequence; empty where it can."""
        for feature in asked(join.inputs, [(a.scale, a.start) for a in join.adapters]):
            if feature not in self._computes:
                return REFUSED.format(FEATURES[feature])
        absent = (a.adapter for a in join.adapters if a.adapter not in self.adapters)
        return next((REFUSED.format(f"adapter {id}, which is not loaded (Join.adapters)") for id in absent), "")

    def _check(self, ids: np.ndarray) -> None:
        if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            raise ValueError(f"token ids from {ids.min()} to {ids.max()}, expected [0, {self._vocab_size})")

    def _new(self, join: Join) -> Row:
        known, arrays = np.frombuffer(join.ids, np.int32), self.arrays
        ids, tables = arrays.ids[join.row], [table[join.row] for table in arrays.tables]
        ids[: len(known)] = known
        for table in tables:
            table[:] = 0  # no block of the sequence before
        adapter = join.adapters[0].adapter if join.adapters else 0
        arrays.adapters[join.row] = adapter
        return Row(
            join.spec,
            join.prompt_len,
            ids,
            len(known),
            tables,
            adapter,
            join.carry,
            [0] * len(tables),
            self._missing(join),
        )

    def _extend(self, row: Row, work: Work) -> None:
        for group, (first, blocks) in enumerate(work.blocks):
            assert first <= row.filled[group], "a gap in a block table"
            row.tables[group][first : first + len(blocks)] = blocks
            row.filled[group] = first + len(blocks)
        for token in np.frombuffer(work.appended, np.int32):
            row.append(int(token))

    def _beyond(self, work: Work) -> str:
        """What work asks for that the executor has no code for; ignored, it would be computed wrongly."""
        if not (work.drafted or work.pending):
            return ""
        asked = {
            "drafted": (work.drafted, "drafted ids (Work.drafted)"),
            "pending": (work.pending, "transfers to wait for (Work.pending)"),
        }
        names = (what for seat, (given, what) in asked.items() if given and seat not in self._computes)
        return next((REFUSED.format(what) for what in names), "")
