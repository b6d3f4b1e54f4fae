"""All ranks of a model in one process: what runs their programs together, with the interface of one.

It computes the same bits as the program of the whole model, at no gain in speed: it is how the split, the meetings and
their order are tested, and the shape of an executor whose ranks are processes or machines.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from kvasir.layers.adapters import Pairs
from kvasir.layers.rows import RowArrays
from kvasir.parallel.local import LocalRanks
from kvasir.plan import Bytes
from kvasir.program.cache import NativeCache
from kvasir.program.program import Program


class RankedCache:
    """The caches of all ranks, each with the blocks of its own heads; what is exported is all parts, by rank."""

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
        for cache in self.caches:
            cache.copy(group, pairs)

    def export(self, group: int, block: int) -> memoryview:
        return memoryview(b"".join(cache.export(group, block) for cache in self.caches))

    def import_(self, group: int, block: int, data: Bytes) -> None:
        size = len(data) // len(self.caches)
        for i, cache in enumerate(self.caches):
            cache.import_(group, block, memoryview(data)[i * size : (i + 1) * size])

    def fill_(self, value: float) -> None:
        for cache in self.caches:
            cache.fill_(value)


class RankedProgram:
    """`programs`, by rank, of the parts of one model. States, pieces and results are those of rank 0: the other ranks
    get a copy of the first two at each step. All ranks sample, and all write the same tokens."""

    def __init__(self, ranks: LocalRanks, programs: Sequence[Program]):
        self.programs = list(programs)
        self.lead = lead = self.programs[0]
        self.cache = RankedCache([program.cache for program in programs])
        self.states, self.pieces, self.results = lead.states, lead.pieces, lead.results
        self.lowered, self.pool, self.vocab = lead.lowered, lead.pool, lead.vocab
        self._ranks = ranks
        self._threads = ThreadPoolExecutor(len(self.programs))
        self._running: list[Future[Any]] = []

    def bind(self, rows: RowArrays) -> None:
        """See Program.bind. The other ranks read the same rows."""
        self.lead.bind(rows)

    # -- a step

    def start(self, num_pieces: int, end: int) -> None:
        for other in self.programs[1:]:
            ctypes.memmove(other.states, self.states, ctypes.sizeof(self.states))
            ctypes.memmove(other.pieces, self.pieces, ctypes.sizeof(self.pieces))
        self._begin(lambda program: program.run(num_pieces, end))

    def wait(self) -> None:
        self._end()

    def settle(self) -> None:
        for running in self._running:
            running.exception()
        self._running = []
        self._ranks.reset()

    def run(self, num_pieces: int, end: int) -> None:
        self.start(num_pieces, end)
        self.wait()

    def logits_of(self, rows: Sequence[int]) -> np.ndarray:
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
        """The results, by rank. Raises what a rank raised by itself, not for another."""
        running, self._running = self._running, []
        errors = [error for one in running if (error := one.exception())]
        if errors:
            self._ranks.reset()
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [one.result() for one in running]

    # -- what a step left: every rank has it

    @property
    def seconds(self) -> float:
        return max(program.seconds for program in self.programs)

    def hidden(self, count: int) -> np.ndarray:
        return self.lead.hidden(count)

    def export(self, name: str, count: int) -> np.ndarray:
        return self.lead.export(name, count)

    def left_logits(self, count: int) -> np.ndarray:
        return self.lead.left_logits(count)

    # -- the rest

    def set_adapter(self, adapter: int, pairs: Pairs | None) -> None:
        for program in self.programs:
            program.set_adapter(adapter, pairs)

    def close(self) -> None:
        self.settle()
        self._threads.shutdown()
        for program in self.programs:
            program.close()
