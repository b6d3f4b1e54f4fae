"""The program of a model whose other ranks and stages are processes, with the interface of the program of one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from kvasir.errors import DeviceFault
from kvasir.layers.adapters import ModelChanges, Slot
from kvasir.layers.kv_layout import Bank
from kvasir.layers.rows import RowArrays
from kvasir.plan import Bytes
from kvasir.program import commands
from kvasir.program.cache import NativeCache
from kvasir.program.commands import CALL, LOGITS, StepMemory
from kvasir.program.program import Program
from kvasir.program.shared import SharedRank
from kvasir.program.shared_packing import SharedAdapter, SharedPacking
from kvasir.program.staged import StagedProgram


class Others(Protocol):
    """The processes of the other ranks and stages, for rank 0 of the last stage, which leads. mesh: its own. steps,
    rows, pipe: files in memory that all have open."""

    @property
    def mesh(self) -> SharedRank: ...
    @property
    def steps(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def pipe(self) -> int: ...

    def send(self, message: Bytes) -> None:
        """Sends a message to each. Raises DeviceFault if one is gone."""
        ...

    def receive(self) -> Sequence[Bytes]:
        """The answers of all, by rank. Raises DeviceFault if one is gone."""
        ...

    def ask(self, message: Bytes) -> Callable[[], Sequence[Bytes]]:
        """Sends a message about an adapter to each; returns a function that waits for their answers. For any thread,
        one message at a time. Raises as `send` and `receive`."""
        ...

    def lost(self) -> str:
        """Why the ranks were aborted."""
        ...

    def close(self) -> None:
        """Ends them."""
        ...


class Calls:
    """Messages from rank 0 to all others, between steps."""

    def __init__(self, others: Others, memory: StepMemory):
        self._others, self._memory = others, memory

    def settle(self) -> None:
        """Waits for all ranks. Raises DeviceFault if one is gone."""
        if not self._others.mesh.settle():
            raise DeviceFault(f"the ranks of the model have stopped: {self._others.lost()}")

    def call(self, message: commands.Message) -> Sequence[Bytes]:
        """The answers of the other ranks. Raises DeviceFault if one is gone."""
        self._memory.write(CALL)
        self._others.mesh.give()
        self._others.send(commands.encode(message))
        answers = self._others.receive()
        self.settle()
        return answers


class RemoteCache:
    """The caches of all processes, each with the blocks of its own heads and layers; rank 0's has the layers of a draft
    model, too. An exported block is the concatenation of its shards, by the processes' numbers."""

    def __init__(self, own: NativeCache, mesh: SharedRank, calls: Calls):
        self._own, self._calls = own, calls
        self._of = f"{mesh.size} ranks" if mesh.stages == 1 else f"{mesh.size} ranks in {mesh.stages} stages"
        self._shards: dict[int, list[int]] = {}  # the bytes of each in an exported block, by group
        self.groups, self.block_size, self.num_blocks, self.kv_dtype = (
            own.groups,
            own.block_size,
            own.num_blocks,
            own.kv_dtype,
        )

    def orders(self, group: int) -> list[tuple[Bank, str]]:
        """See NativeCache.orders. Blocks of other numbers of ranks have other shards."""
        return [(bank, f"{order}, of {self._of}") for bank, order in self._own.orders(group)]

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks in every rank's cache; pairs: (source, target)."""
        self._calls.call(commands.CopyBlocks(group, list(pairs)))
        self._own.copy(group, pairs)

    def export(self, group: int, block: int) -> memoryview:
        """A copy of a block's bytes: those of each rank, concatenated."""
        theirs = self._calls.call(commands.ExportBlock(group, block))
        return memoryview(b"".join((self._own.export(group, block), *theirs)))

    def import_(self, group: int, block: int, data: Bytes) -> None:
        """Writes bytes from `export` into a block."""
        if group not in self._shards:
            theirs = self._calls.call(commands.ExportBlock(group, 0))
            self._shards[group] = [len(self._own.export(group, 0)), *map(len, theirs)]
        own, *sizes = self._shards[group]
        self._own.import_(group, block, memoryview(data)[:own])
        for number, size in enumerate(sizes, 1):
            shard, own = memoryview(data)[own : own + size], own + size
            if size:
                self._calls.call(commands.ImportBlock(group, block, number, bytes(shard)))

    def fill_(self, value: float) -> None:
        """See NativeCache.fill_."""
        self._calls.call(commands.FillCache(value))
        self._own.fill_(value)


class RemoteProgram:
    """The program of rank 0, which leads those of the other ranks: it samples, and they compute what it says. States,
    pieces and results are its own. After the loss of a rank every call raises DeviceFault. whole: whether stages
    compute a step in one part, since they read weights from disk for each."""

    def __init__(self, lead: Program | StagedProgram, others: Others, whole: bool = False):
        self.lead, self._others, self._mesh = lead, others, others.mesh
        self._memory = StepMemory(others.steps, len(lead.states), lead.struct.max_tokens, whole)
        self._calls = Calls(others, self._memory)
        if isinstance(lead, StagedProgram):
            lead.join(others.mesh, others.pipe, self._memory)
        self.cache = RemoteCache(lead.cache, others.mesh, self._calls)
        self.states, self.pieces, self.results, self.struct = lead.states, lead.pieces, lead.results, lead.struct
        self.lowered, self.pool, self.vocab, self.types = lead.lowered, lead.pool, lead.vocab, lead.types
        self.trace, self._closed = lead.trace, False
        self._packing = SharedPacking(lead.adapters, others.ask)

    def bind(self, rows: RowArrays) -> RowArrays:
        """See Program.bind. Returns rows of the same sizes in memory that all ranks share."""
        shape = commands.RowShape.of(rows)
        os.ftruncate(self._others.rows, 0)
        os.ftruncate(self._others.rows, shape.nbytes)
        shared = commands.map_rows(self._others.rows, shape)
        self._calls.call(shape)
        return self.lead.bind(shared)

    # -- a step

    def start(self, num_pieces: int, end: int) -> None:
        """See Program.start."""
        self._calls.settle()
        parts = self._memory.write_step(self.lead, num_pieces, end, self._mesh.stages)
        self._mesh.give(parts)
        try:
            self.lead.start(num_pieces, end)
        except BaseException:
            self._mesh.abort()
            raise

    def wait(self) -> None:
        """See Program.wait. Waits for the other ranks, too, since they read the rows."""
        self.lead.wait()
        self._calls.settle()

    def settle(self) -> None:
        """See Program.settle."""
        self.lead.settle()
        self._mesh.settle()

    def run(self, num_pieces: int, end: int) -> None:
        """See Program.run."""
        self.start(num_pieces, end)
        self.wait()

    def logits_of(self, rows: Sequence[int]) -> np.ndarray:
        """See Program.logits_of."""
        self._calls.settle()
        self._memory.chosen[: len(rows)] = rows
        self._memory.write(LOGITS, len(rows))
        self._mesh.give()
        found = self.lead.logits_of(rows)
        self._calls.settle()
        return found

    # -- values of the last step

    @property
    def seconds(self) -> float:
        """Kernel time of rank 0 in the last run, with its waits for the others."""
        return self.lead.seconds

    def hidden(self, count: int) -> np.ndarray:
        """See Program.hidden."""
        return self.lead.hidden(count)

    def export(self, name: str, count: int) -> np.ndarray:
        """See Program.export."""
        return self.lead.export(name, count)

    def left_logits(self, count: int) -> np.ndarray:
        """See Program.left_logits."""
        return self.lead.left_logits(count)

    # -- adapters

    @property
    def slots(self) -> Mapping[str, Slot]:
        """See Program.slots."""
        return self.lead.adapters.slots

    def lacks(self, adapter: ModelChanges) -> str:
        """See Program.lacks. What other stages lack is found when it is packed."""
        return self.lead.adapters.lacks(adapter)

    def pack_adapter(self, adapter: ModelChanges) -> SharedAdapter:
        """See Program.pack_adapter."""
        return self._packing.pack(adapter)

    def set_adapter(self, adapter: int, packed: SharedAdapter | None) -> None:
        """See Program.set_adapter."""
        key, rank = (None, 0) if packed is None else (packed.key, packed.rank)
        self._calls.call(commands.SetAdapter(adapter, key, rank, self._packing.dropped()))
        self.lead.set_adapter(adapter, packed and replace(packed.own, rank=packed.rank))

    def close(self) -> None:
        """Waits for a step in progress, then ends the threads and the other ranks."""
        if self._closed:
            return
        self._closed = True
        self.lead.settle()
        self._others.close()
        self.lead.close()
