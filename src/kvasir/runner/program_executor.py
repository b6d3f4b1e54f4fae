"""The program executor: runs a traced program, one native call per step, while the caller can plan.

From joining to leaving, a row's ids and block tables stay where the kernels read them; a few integers per sequence
describe a step. Rows with a grammar's mask are sampled by a second native call, from the logits of the first, so masks
can be computed during the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kvasir.layers.adapters import Pairs
from kvasir.ops.attention.native import PIECE_BIDIRECTIONAL, PIECE_LOGITS, PIECE_SAMPLE, Piece
from kvasir.plan import Decodes, Join, Work
from kvasir.program.cache import NativeCache
from kvasir.program.marshal import MAX_CHOSEN
from kvasir.program.native import records
from kvasir.program.program import Program
from kvasir.runner.blocks import move_blocks, wait_all
from kvasir.runner.drafts import along
from kvasir.runner.executor import Entry, ExecutorStep, Taken
from kvasir.runner.rows import Row, Rows
from kvasir.sampling.native import (
    SAMPLE_ERRORS,
    NativeSampler,
    SampledStruct,
    SampleRow,
    entry_of,
    fill_carry,
    fill_spec,
    next_carry,
)
from kvasir.sampling.rows import BadLogits


class ProgramExecutor:
    """model: pools embeddings. program: computes steps."""

    computes = frozenset(("drafted", "second"))
    queues = False
    columns = True

    def __init__(self, model: Any, program: Program):
        self.model, self.program = model, program
        self.hidden = frozenset(program.lowered.exports)
        self._kept: dict[int, list] = {}  # by row, the arrays that its native state points to

    @property
    def cache(self) -> NativeCache:
        return self.program.cache

    @property
    def overlaps(self) -> bool:
        return self.program.pool.apart

    def bind(self, rows: Rows) -> None:
        self.rows = rows
        self.program.bind(rows.arrays)
        self._pieces = records(self.program.pieces, Piece)
        self.results = records(self.program.results, SampledStruct)

    def enter(self, join: Join, row: Row) -> None:
        state = self.program.states[join.row]
        state.adapter, state.reached = row.adapter, 0
        self._kept[join.row] = [*fill_spec(state.spec, row.spec, row.prompt_len, len(row.ids))]

    def settle(self) -> None:
        self.program.settle()

    def start(self, step: ExecutorStep) -> ProgramHandle:
        saved = wait_all(move_blocks(self.cache, step.plan))
        works, pieces, first = step.works, self.program.pieces, len(step.plan.decodes)
        sampled = first + len(step.now) + len(step.later)
        kept = PIECE_LOGITS * (sampled <= MAX_CHOSEN)  # else the buffer could not hold all logits
        end = self._decode(step.plan.decodes) if step.plan.decodes else 0
        for at, work in enumerate(works, first):
            piece = pieces[at]
            piece.row, piece.flags, piece.start, piece.count = work.row, _flags(work, kept), work.start, work.count
            end = max(end, work.end)
            if work.sample and (row := self.rows[work.row]).spec.carries:
                fill_carry(self.program.states[work.row].spec, row.spec, row.carry)
        if self.program.types is not None:
            self._fill_types(self.program.types, works, step.starts)
        if end:
            self.program.start(first + len(works), end)
        return ProgramHandle(self, step, saved)

    def _fill_types(self, types: np.ndarray, works: Sequence[Work], starts: Sequence[int]) -> None:
        """Sets the token types of a step's rows."""
        for work, begin in zip(works, starts, strict=False):
            second = self.rows.arrays.seconds[work.row] or work.end
            types[begin : begin + work.count] = np.arange(work.start, work.end) >= second

    def _decode(self, decodes: Decodes) -> int:
        """Fills the first pieces with the decodes; returns their greatest end."""
        pieces, starts = self._pieces[: len(decodes)], np.frombuffer(decodes.starts, np.int32)
        pieces["row"], pieces["start"] = np.frombuffer(decodes.rows, np.int32), starts
        pieces["flags"], pieces["count"] = PIECE_SAMPLE, 1
        return int(starts.max()) + 1

    def set_adapter(self, adapter: int, pairs: Pairs | None) -> None:
        self.program.set_adapter(adapter, pairs)

    def close(self) -> None:
        self.program.close()

    def __del__(self) -> None:
        if hasattr(self, "program"):  # its threads read the rows
            self.close()

    # -- sampling from computed logits

    @cached_property
    def sampler(self) -> NativeSampler:
        return NativeSampler(self.program.vocab, self.program.pool)

    def take(self, logits: np.ndarray, works: Sequence[Work], masks: Sequence[bytes | None]) -> Iterator[Taken]:
        """Samples one id from each row of logits."""
        specs = (SampleRow * len(works))()
        for spec_at, (work, mask) in enumerate(zip(works, masks, strict=True)):
            specs[spec_at] = self.program.states[work.row].spec  # a copy
            row = self.rows[work.row]
            _complete(specs[spec_at], row, mask, row.known, row.carry)
        for found, work in zip(self.sampler.run(logits, specs), works, strict=True):
            row = self.rows[work.row]
            yield self.taken(found, row, row.carry)

    def taken(self, found: SampledStruct, row: Row, carry: bytes) -> Taken:
        if found.error:
            return Taken(error=SAMPLE_ERRORS[found.error])
        carry = next_carry(found, row.spec, carry) if row.spec.carries else carry
        entry = entry_of(found, row.spec.logprobs, self.program.vocab) if row.spec.logprobs >= 0 else None
        return Taken((found.token,), () if entry is None else (entry,), carry)


@dataclass(frozen=True, slots=True)
class ProgramHandle:
    """A pending step, whose results are in the program's buffers."""

    executor: ProgramExecutor
    step: ExecutorStep
    blocks: tuple[memoryview, ...]

    def wait(self) -> float:
        if not (self.step.works or self.step.plan.decodes):
            return 0.0
        self.executor.program.wait()
        return self.executor.program.seconds

    def decoded(self) -> tuple[np.ndarray, dict[int, str]]:
        found = self.executor.results[: len(self.step.plan.decodes)]
        failed = np.flatnonzero(found["error"]).tolist()
        return found["token"], {place: SAMPLE_ERRORS[int(found["error"][place])] for place in failed}

    def taken(self) -> list[Taken]:
        executor, works, first = self.executor, self.step.works, len(self.step.plan.decodes)
        found = ((executor.program.results[place], at) for place, at in enumerate(self.step.now, first))
        rows = ((sampled, executor.rows[works[at].row]) for sampled, at in found)
        return [executor.taken(sampled, row, row.carry) for sampled, row in rows]

    def begin(self, at: Sequence[int], masks: Sequence[bytes | None]) -> bool:
        return False

    def take(self, at: Sequence[int], masks: Sequence[bytes | None]) -> list[Taken]:
        by_place = dict(zip(at, masks, strict=True))
        drafted = [place for place in at if self.step.works[place].drafted]
        found: dict[int, Taken] = {}
        for part, logits in self.logits_of([place for place in at if place not in drafted]):
            works = [self.step.works[place] for place in part]
            taken = self.executor.take(logits, works, [by_place[place] for place in part])
            found.update(zip(part, taken, strict=True))
        # Last, because computing their logits overwrites the logits that the run left.
        found.update((place, self._along(place, by_place[place])) for place in drafted)
        return [found[place] for place in at]

    def _along(self, place: int, mask: bytes | None) -> Taken:
        executor, work = self.executor, self.step.works[place]
        row, end = executor.rows[work.row], self.step.starts[place + 1]
        logits = executor.program.logits_of(range(end - 1 - work.drafted, end))

        def draw(i: int, known: int, mask: bytes | None, carry: bytes) -> Taken:
            specs = (SampleRow * 1)(executor.program.states[work.row].spec)
            _complete(specs[0], row, mask, known, carry)
            [found] = executor.sampler.run(logits[i : i + 1], specs)
            return executor.taken(found, row, carry)

        return along(work, row, mask, draw)

    def logits_of(self, at: Sequence[int]) -> Iterator[tuple[list[int], np.ndarray]]:
        """Places of works with the logits of their last token rows: contiguous slices of the buffer if the run left
        them there, otherwise computed again."""
        program, left, open_ = self.executor.program, self._left(), list(at)
        while open_:
            count = 1
            if left:
                open_.sort(key=left.__getitem__)
                first = left[open_[0]]
                while count < len(open_) and left[open_[count]] == first + count:
                    count += 1
                logits = program.left_logits(first + count)[first:]
            else:
                count = min(len(open_), MAX_CHOSEN)
                logits = program.logits_of([self.step.starts[place + 1] - 1 for place in open_[:count]])
            yield open_[:count], logits
            open_ = open_[count:]

    def _left(self) -> dict[int, int]:
        """The buffer index of each place's logits; empty if the step's logits exceeded the buffer."""
        chosen, first = (*self.step.now, *self.step.later), len(self.step.plan.decodes)
        return {place: at for at, place in enumerate(chosen, first)} if first + len(chosen) <= MAX_CHOSEN else {}

    def read(self, at: int) -> tuple[tuple[Entry, ...], str]:
        work, first = self.step.works[at], self.step.starts[at]
        row, entries = self.executor.rows[work.row], []
        for begin in range(*work.read, MAX_CHOSEN):
            end = min(begin + MAX_CHOSEN, work.read[1])
            rows = range(first + begin - work.start, first + end - work.start)
            logits = self.executor.program.logits_of(rows)
            try:
                entries += self.executor.sampler.describe(logits, *row.read(begin, end))
            except BadLogits as error:
                return (), str(error)
        return tuple(entries), ""

    def pooled(self, at: int) -> bytes:
        first, end = self.step.starts[at], self.step.starts[at + 1]
        executor, task = self.executor, self.step.works[at].want_pooled
        name = getattr(executor.model, "outputs", {}).get(task)
        rows = executor.program.hidden(end) if name is None else executor.program.export(name, end)
        return executor.model.pool(rows[first:], task).tobytes()

    def hidden(self, at: int, name: str) -> bytes:
        first, end = self.step.starts[at], self.step.starts[at + 1]
        return self.executor.program.export(name, end)[first:].tobytes()

    def saved(self) -> tuple[memoryview, ...]:
        return self.blocks


def _complete(target: SampleRow, row: Row, mask: bytes | None, known: int, carry: bytes) -> None:
    """Sets the fields that change from step to step. mask: must live as long as the target is used."""
    fill_carry(target, row.spec, carry)
    target.ids, target.num_ids, target.position = row.ids.ctypes.data, known, known
    if mask is not None:
        words = np.frombuffer(mask, np.int32)
        target.mask, target.mask_words = words.ctypes.data, len(words)


def _flags(work: Work, kept: int) -> int:
    sampling = (kept if work.masked or work.drafted else PIECE_SAMPLE) if work.sample else 0
    return sampling | PIECE_BIDIRECTIONAL * work.indivisible
