"""The programs of one stage of a model, with the interface of a Program.

A step's rows are divided into parts, by sequences; a long prompt's rows go as several parts, in their order. Stages
compute the parts one after the other, each as soon as the stage before has left it in shared memory, so they work at
the same time. The last stage collects the hidden rows of all parts; then its tail, a program of its own, computes
logits and samples, over the whole step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvasir.layers.adapters import ModelChanges, Slot
from kvasir.layers.rows import RowArrays
from kvasir.ops.attention.native import PIECE_BIDIRECTIONAL
from kvasir.program.cache import NativeCache
from kvasir.program.changes import PackedAdapter
from kvasir.program.commands import StepMemory
from kvasir.program.native import Piece, records
from kvasir.program.program import Program
from kvasir.program.shared import SharedRank
from kvasir.program.stages import Stage, sent_name


class Pipe:
    """The values that cross the borders between stages, in memory that all processes map. fd: a file in memory, which
    grows to what is needed. widths: as of a Stage. Each step overwrites those of the step before."""

    def __init__(self, fd: int, widths: Sequence[Sequence[int]], max_tokens: int):
        size = max(1, sum(map(sum, widths))) * max_tokens * 4
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        memory, at = mmap.mmap(fd, size), 0
        self.borders: list[list[np.ndarray]] = []
        for values in widths:
            self.borders.append([])
            for width in values:
                found = np.frombuffer(memory, np.float32, max_tokens * width, at)
                self.borders[-1].append(found.reshape(max_tokens, width))
                at += found.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class StagedAdapter:
    """An adapter, packed for each program of a stage."""

    parts: tuple[PackedAdapter, ...]
    rank: int
    nbytes: int


class StagedAdapters:
    """The adapters of a stage's programs, as those of one (`adapters.Adapters`)."""

    def __init__(self, programs: Sequence[Program]):
        self.each = [program.adapters for program in programs]

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Of linears that this stage has."""
        return {name: slot for one in self.each for name, slot in one.slots.items()}

    def part_of(self, name: str) -> tuple[int, int] | None:
        """See Places.part_of."""
        return next(filter(None, (one.part_of(name) for one in self.each)), None)

    def lacks(self, adapter: ModelChanges) -> str:
        """See Program.lacks."""
        return next(filter(None, (one.lacks(adapter) for one in self.each)), "")

    def check(self, adapter: ModelChanges) -> None:
        """See Adapters.check."""
        for one in self.each:
            one.check(adapter)

    def squares(self, adapter: ModelChanges) -> dict[str, np.ndarray]:
        """See Adapters.squares."""
        return {name: found for one in self.each for name, found in one.squares(adapter).items()}

    def pack(self, adapter: ModelChanges, squares: Mapping[str, np.ndarray]) -> StagedAdapter:
        """See Adapters.pack."""
        parts = tuple(one.pack(adapter, squares) for one in self.each)
        return StagedAdapter(parts, max(part.rank for part in parts), sum(part.nbytes for part in parts))


class StagedProgram:
    """stage: of this process. cache: with memory for its layers. sizes: as of a Program. After `join`, steps are those
    that the memory of steps describes. States, pieces and results are those of the whole step, of which only the last
    stage has results."""

    def __init__(self, stage: Stage, cache: NativeCache, **sizes: Any):
        self.stage, self.cache = stage, cache
        self.body = Program(stage.body, cache, **{**sizes, "samples": False})
        self.pool = self.body.pool
        tail = {**sizes, "pool": self.pool}
        self.tail = Program(stage.tail, cache, **tail) if stage.tail else None
        self.programs = [self.body, *([self.tail] if self.tail else [])]
        whole = self.tail or self.body
        self.states, self.pieces, self.results, self.struct = whole.states, whole.pieces, whole.results, whole.struct
        self.lowered, self.vocab, self.trace, self.types = whole.lowered, whole.vocab, whole.trace, self.body.types
        self.adapters = StagedAdapters(self.programs)
        self._pieces = records(self.body.pieces, Piece)
        self._threads = ThreadPoolExecutor(1, "kvasir-stage") if self.pool.apart else None
        self._running: Future[None] | None = None

    def join(self, mesh: SharedRank, pipe: int, memory: StepMemory) -> None:
        """Connects it with the other stages. pipe: a file in memory that all have open."""
        self._mesh, self._memory = mesh, memory
        self._pipe = Pipe(pipe, self.stage.widths, self.struct.max_tokens)

    def bind(self, rows: RowArrays) -> RowArrays:
        """See Program.bind."""
        for program in self.programs:
            program.bind(rows)
        return rows

    # -- a step

    def start(self, num_pieces: int, end: int) -> None:
        """Begins the step in the memory of steps. See Program.start."""
        if self._threads:
            self._running = self._threads.submit(self.run, num_pieces, end)
        else:
            self.run(num_pieces, end)

    def wait(self) -> None:
        """See Program.wait."""
        running, self._running = self._running, None
        if running:
            running.result()

    def settle(self) -> None:
        """See Program.settle."""
        running, self._running = self._running, None
        if running:
            running.exception()

    def run(self, num_pieces: int, end: int) -> None:
        """Computes the step. Once the processes are aborted, its results are meaningless."""
        self.seconds, row = 0.0, 0
        self._memory.read_states(self.body)
        for pieces, types in self._memory.parts():
            if self.stage.number and not self._mesh.receive():
                return
            row = self._compute(pieces, types, row)
            self._mesh.send()
        if self.tail:
            self.tail.run(num_pieces, end)
            self.seconds += self.tail.seconds

    def _compute(self, pieces: np.ndarray, types: np.ndarray, row: int) -> int:
        """Computes a part, whose first token row of the step is `row`; returns the row after it."""
        count = int(pieces["count"].sum())
        if self.stage.number:
            received = [values[row : row + count] for values in self._pipe.borders[self.stage.number - 1]]
            for buffer, rows in zip(self.body.lowered.received, received, strict=True):
                self.body.memory.view(buffer, count)[:] = rows
        if self.body.types is not None:
            self.body.types[:count] = types
        own = self._pieces[: len(pieces)]
        own[:] = pieces
        own["flags"] &= PIECE_BIDIRECTIONAL  # the tail samples
        own["drafted"] = 0
        self.body.run(len(pieces), int((pieces["start"] + pieces["count"]).max()))
        self.seconds += self.body.seconds
        for i, rows in enumerate(self._sent(row + count)):
            rows[row:] = self.body.export(sent_name(i), count)
        return row + count

    def _sent(self, end: int) -> list[np.ndarray]:
        """Where the values that this stage leaves go, up to the token row `end` of the step."""
        if self.tail:
            return [self.tail.memory.view(buffer, end) for buffer in self.tail.lowered.received]
        return [values[:end] for values in self._pipe.borders[self.stage.number]]

    # -- values of the last step, which the last stage has

    @property
    def last(self) -> Program:
        """What computes results."""
        assert self.tail, "only the last stage has results"
        return self.tail

    def hidden(self, count: int) -> np.ndarray:
        """See Program.hidden."""
        return self.last.hidden(count)

    def export(self, name: str, count: int) -> np.ndarray:
        """See Program.export."""
        return self.last.export(name, count)

    def logits_of(self, rows: Sequence[int]) -> np.ndarray:
        """See Program.logits_of."""
        return self.last.logits_of(rows)

    def left_logits(self, count: int) -> np.ndarray:
        """See Program.left_logits."""
        return self.last.left_logits(count)

    # -- the rest

    def set_adapter(self, adapter: int, packed: StagedAdapter | None) -> None:
        """See Program.set_adapter."""
        for i, program in enumerate(self.programs):
            part = packed and replace(packed.parts[i], rank=packed.rank)
            program.set_adapter(adapter, part)

    def close(self) -> None:
        """See Program.close."""
        self.settle()
        if self._threads:
            self._threads.shutdown()
        for program in reversed(self.programs):
            program.close()

    @property
    def num_bytes(self) -> int:
        """See Program.num_bytes."""
        return sum(program.num_bytes for program in self.programs)
