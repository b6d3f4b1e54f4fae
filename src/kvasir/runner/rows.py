"""Rows: the runner's state of each running sequence, from joining to leaving."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from kvasir.inputs import FEATURES, MAX_ADAPTERS_OF_REQUEST, asked
from kvasir.layers.rows import RowArrays
from kvasir.plan import Adapted, Capacity, Decodes, Join, SamplingSpec, StepPlan, Work, unpack_ids

BROKEN = "an earlier step of this sequence failed"
REFUSED = "this runner cannot compute {}"


@dataclass(slots=True)
class Row:
    """The state of one sequence; its arrays are views of Rows.arrays. number: its index in them. ids: int32
    [max_model_len + 1], the first `known` are valid. counts: `known` of all rows. tables: block ids per cache group,
    int32. adapters: in the order in which they apply.

    fault: why the row is no longer computed: the sequence needs a feature that the runner lacks, or a step of it
    failed, so that works planned meanwhile have nothing to build on. Empty while the row is sound.
    """

    number: int
    spec: SamplingSpec
    prompt_len: int
    ids: np.ndarray
    counts: array[int]
    tables: list[np.ndarray]
    adapters: tuple[Adapted, ...] = ()
    carry: bytes = b""
    filled: list[int] = field(default_factory=list)  # valid entries per table
    fault: str = ""

    @property
    def adapter(self) -> int:
        """The id of the first adapter, 0 for none."""
        return self.adapters[0].adapter if self.adapters else 0

    @property
    def known(self) -> int:
        return self.counts[self.number]

    @known.setter
    def known(self, known: int) -> None:
        self.counts[self.number] = known

    def read(self, first: int, end: int) -> tuple[list[int], list[int]]:
        """The ids after the positions [first, end), and the number of top log-probabilities wanted with each."""
        assert end < self.known, "no id is known after the last position"
        split = min(max(self.prompt_len - 1 - first, 0), end - first)
        best = [self.spec.prompt_logprobs] * split + [self.spec.logprobs] * (end - first - split)
        return self.ids[first + 1 : end + 1].tolist(), best

    def append(self, token: int) -> None:
        """Appends one id."""
        self.ids[self.known] = token
        self.known += 1

    def take(self, work: Work, tokens: tuple[int, ...], carry: bytes) -> None:
        """Replaces the drafted ids of a work by the ids that it sampled."""
        self.known = work.start + work.count - work.drafted
        for token in tokens:
            self.append(token)
        self.carry = carry


class Rows:
    """Applies plans to rows, which lie in `arrays`. computes: see Executor; other features are refused by name."""

    def __init__(self, capacity: Capacity, computes: frozenset[str] = frozenset()):
        self._vocab_size = capacity.vocab_size
        longest, groups = capacity.max_model_len, capacity.groups
        blocks = 1 + max(group.kind.blocks(longest, capacity.block_size) for group in groups)
        self.arrays = RowArrays.empty(capacity.max_rows, longest + 1, len(groups), blocks)
        self._counts = array("i", bytes(4 * capacity.max_rows))
        self._broken: set[int] = set()
        self._computes = computes
        self._rows: list[Row | None] = [None] * capacity.max_rows
        self.adapters: set[int] = {0}  # ids of the loaded adapters; 0 is none

    def __getitem__(self, row: int) -> Row:
        found = self._rows[row]
        assert found is not None, "work for an empty row"
        return found

    @property
    def known(self) -> np.ndarray:
        """Number of known ids of each row, int32 [max_rows], 0 for an empty row."""
        return np.frombuffer(self._counts, np.int32)

    @property
    def used(self) -> int:
        """Number of occupied rows."""
        return sum(r is not None for r in self._rows)

    def has(self, place: int, row: Row) -> bool:
        """Whether `row` still occupies this place."""
        return self._rows[place] is row

    def break_(self, row: Row) -> None:
        """Marks a row as broken after one of its steps failed."""
        row.fault = row.fault or BROKEN
        if self.has(row.number, row):
            self._broken.add(row.number)

    def sound(self, rows: np.ndarray) -> bool:
        """Whether no earlier step of any of the rows failed. rows: [S] int32."""
        return not self._broken or self._broken.isdisjoint(rows.tolist())

    def take(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Appends one sampled id to each of the rows."""
        known = self.known
        self.arrays.ids[rows, known[rows]] = tokens
        known[rows] += 1

    def apply(self, plan: StepPlan) -> None:
        """Frees, fills and extends rows as the plan requires. Raises ValueError for ids outside the vocabulary, which
        the kernels do not check, and for encoder jobs if there is no encoder; in both cases rows are only freed."""
        for row in plan.left:
            self._rows[row] = None
            self._counts[row] = 0
            self._broken.discard(row)
        if plan.encodes and "encodes" not in self._computes:
            raise ValueError(REFUSED.format("the output of an encoder (StepPlan.encodes)"))
        for ids in (*(join.ids for join in plan.joined), *(work.appended for work in plan.work if work.appended)):
            self._check(np.frombuffer(ids, np.int32))
        for join in plan.joined:
            assert self._rows[join.row] is None, "a sequence joins in a row that is in use"
            self._rows[join.row] = self._new(join)
        if plan.decodes:
            self._decode(plan.decodes)
        for work in plan.work:
            self._extend(self[work.row], work)
            self[work.row].fault = self[work.row].fault or self._beyond(work)

    def _missing(self, join: Join) -> str:
        """Why the runner cannot compute the sequence; empty if it can."""
        for feature in asked(join.inputs, [(a.scale, a.start) for a in join.adapters]):
            if feature not in self._computes:
                return REFUSED.format(FEATURES[feature])
        if len(join.adapters) > MAX_ADAPTERS_OF_REQUEST:
            return REFUSED.format(f"more than {MAX_ADAPTERS_OF_REQUEST} adapters of a sequence (Join.adapters)")
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
            table[:] = 0  # removes the blocks of the previous sequence
        adapters = tuple(adapted for adapted in join.adapters if adapted.adapter)
        arrays.seconds[join.row] = join.inputs.second
        self._counts[join.row] = len(known)
        return Row(
            join.row,
            join.spec,
            join.prompt_len,
            ids,
            self._counts,
            tables,
            adapters,
            join.carry,
            [0] * len(tables),
            self._missing(join),
        )

    def _decode(self, decodes: Decodes) -> None:
        rows, starts = (np.frombuffer(column, np.int32) for column in (decodes.rows, decodes.starts))
        assert (self.known[rows] == starts + 1).all(), "a decoding row lacks more than its last token"
        for place, group, index, block in decodes.blocks:
            self._enter(self[rows[place]], group, index, (block,))

    def _extend(self, row: Row, work: Work) -> None:
        for group, (first, blocks) in enumerate(work.blocks):
            if blocks:
                self._enter(row, group, first, blocks)
        for token in unpack_ids(work.appended) if work.appended else ():
            row.append(token)

    def _enter(self, row: Row, group: int, first: int, blocks: tuple[int, ...]) -> None:
        assert first <= row.filled[group], "a gap in a block table"
        row.tables[group][first : first + len(blocks)] = blocks
        row.filled[group] = first + len(blocks)

    def _beyond(self, work: Work) -> str:
        """Why the executor cannot compute the work; empty if it can. Ignoring an unknown field would give wrong
        results."""
        if not (work.drafted or work.pending or work.propose):
            return ""
        asked = {
            "drafted": (work.drafted, "drafted ids (Work.drafted)"),
            "propose": (work.propose, "drafts of its own (Work.propose)"),
            "pending": (work.pending, "transfers to wait for (Work.pending)"),
        }
        names = (what for seat, (given, what) in asked.items() if given and seat not in self._computes)
        return next((REFUSED.format(what) for what in names), "")
