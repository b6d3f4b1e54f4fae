"""All ranks of a model in one process: runs their programs together, with the interface of one program.

It computes the same bits as the program of the whole model, without being faster: it serves to test the sharding, the
collectives and their order, and is the model for an executor whose ranks are processes or machines.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvasir.layers.adapters import ModelChanges, Slot
from kvasir.layers.rows import RowArrays
from kvasir.parallel.local import LocalRanks
from kvasir.plan import Bytes
from kvasir.program.cache import NativeCache
from kvasir.program.changes import PackedAdapter
from kvasir.program.program import Program
from kvasir.program.shared_packing import shared_squares, whole_squares


class RankedCache:
    """The caches of all ranks, each with the blocks of its own heads. An exported block is the concatenation of its
    shards, by rank."""

    def __init__(self, caches: Sequence[NativeCache]):
        self.caches = list(caches)
        lead = caches[0]
        self.groups, self.block_size, self.num_blocks, self.kv_dtype = (
            lead.groups,
            lead.block_size,
            lead.num_blocks,
            lead.kv_dtype,
        )

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks in every rank's cache; pairs: (source, target)."""
        for cache in self.caches:
            cache.copy(group, pairs)

    def export(self, group: int, block: int) -> memoryview:
        """A copy of a block's bytes: those of each rank, concatenated."""
        return memoryview(b"".join(cache.export(group, block) for cache in self.caches))

    def import_(self, group: int, block: int, data: Bytes) -> None:
        """Writes bytes from `export` into a block."""
        size = len(data) // len(self.caches)
        for i, cache in enumerate(self.caches):
            cache.import_(group, block, memoryview(data)[i * size : (i + 1) * size])

    def fill_(self, value: float) -> None:
        """See NativeCache.fill_."""
        for cache in self.caches:
            cache.fill_(value)


@dataclass(frozen=True, slots=True, eq=False)
class RankedAdapter:
    """A packed adapter: the part of each rank."""

    parts: Sequence[PackedAdapter]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class RankedProgram:
    """The programs of all ranks of one model, with the interface of Program. States, pieces and results are those of
    rank 0; each step copies states and pieces to the other ranks. All ranks sample, and all write the same tokens."""

    def __init__(self, ranks: LocalRanks, programs: Sequence[Program]):
        self.programs = list(programs)
        self.lead = lead = self.programs[0]
        self.cache = RankedCache([program.cache for program in programs])
        self.states, self.pieces, self.results = lead.states, lead.pieces, lead.results
        self.lowered, self.pool, self.vocab, self.types = lead.lowered, lead.pool, lead.vocab, lead.types
        self._ranks = ranks
        self._threads = ThreadPoolExecutor(len(self.programs))
        self._running: list[Future[Any]] = []

    def bind(self, rows: RowArrays) -> RowArrays:
        """See Program.bind. All ranks read the same rows."""
        return self.lead.bind(rows)

    # -- a step

    def start(self, num_pieces: int, end: int) -> None:
        """See Program.start."""
        for other in self.programs[1:]:
            ctypes.memmove(other.states, self.states, ctypes.sizeof(self.states))
            ctypes.memmove(other.pieces, self.pieces, ctypes.sizeof(self.pieces))
            if self.types is not None and other.types is not None:
                other.types[:] = self.types
        self._begin(lambda program: program.run(num_pieces, end))

    def wait(self) -> None:
        """See Program.wait. Raises the error of the rank that failed first-hand, not of ranks that waited for it."""
        self._end()

    def settle(self) -> None:
        """See Program.settle."""
        for running in self._running:
            running.exception()
        self._running = []
        self._ranks.reset()

    def run(self, num_pieces: int, end: int) -> None:
        """See Program.run."""
        self.start(num_pieces, end)
        self.wait()

    def logits_of(self, rows: Sequence[int]) -> np.ndarray:
        """See Program.logits_of."""
        self._begin(lambda program: program.logits_of(rows))
        return self._end()[0]

    def _begin(self, work: Callable[[Program], Any]) -> None:
        def guarded(program: Program) -> Any:
            try:
                return work(program)
            except BaseException:
                self._ranks.abort()
                raise

        self._running = [self._threads.submit(guarded, program) for program in self.programs]

    def _end(self) -> list[Any]:
        """Waits for all ranks and returns their results. Raises the first error that is not only the consequence of
        another rank's failure (BrokenBarrierError)."""
        running, self._running = self._running, []
        errors = [error for one in running if (error := one.exception())]
        if errors:
            self._ranks.reset()
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [one.result() for one in running]

    # -- values of the last step: every rank has them

    @property
    def seconds(self) -> float:
        """Kernel time of the slowest rank in the last run."""
        return max(program.seconds for program in self.programs)

    def hidden(self, count: int) -> np.ndarray:
        """See Program.hidden."""
        return self.lead.hidden(count)

    def export(self, name: str, count: int) -> np.ndarray:
        """See Program.export."""
        return self.lead.export(name, count)

    def left_logits(self, count: int) -> np.ndarray:
        """See Program.left_logits."""
        return self.lead.left_logits(count)

    # -- the rest

    @property
    def slots(self) -> Mapping[str, Slot]:
        """See Program.slots."""
        return self.lead.slots

    def lacks(self, adapter: ModelChanges) -> str:
        """See Program.lacks."""
        return next(filter(None, (program.lacks(adapter) for program in self.programs)), "")

    def pack_adapter(self, adapter: ModelChanges) -> RankedAdapter:
        """See Program.pack_adapter; each rank is given all changes. Norms are of whole rows, whose columns several
        ranks may have."""
        adapters = [program.marshal.adapters for program in self.programs]
        for one in adapters:
            one.check(adapter)
        own = [one.squares(adapter) for one in adapters]
        whole = whole_squares(map(shared_squares, adapters, own))
        packed = [one.pack(adapter, {**squares, **whole}) for one, squares in zip(adapters, own, strict=True)]
        rank = max(part.rank for part in packed)  # ranks exchange products of equal widths
        return RankedAdapter([replace(part, rank=rank) for part in packed])

    def set_adapter(self, adapter: int, packed: RankedAdapter | None) -> None:
        """See Program.set_adapter."""
        for i, program in enumerate(self.programs):
            program.set_adapter(adapter, None if packed is None else packed.parts[i])

    def close(self) -> None:
        """Waits for a step in progress and ends the threads of all ranks."""
        self.settle()
        self._threads.shutdown()
        for program in self.programs:
            program.close()
