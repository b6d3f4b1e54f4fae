"""Stages of a model in threads of one process, for tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvasir.layers.rows import RowArrays
from kvasir.parallel.channel import Channel
from kvasir.plan import Bytes
from kvasir.program.cache import NativeCache
from kvasir.program.following import Follower
from kvasir.program.remote import RemoteProgram
from kvasir.program.shared import SharedRank, memory_file, segment_bytes
from kvasir.program.staged import StagedProgram
from kvasir.program.trace import trace
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.runner.make_program import held_layout, program_of
from kvasir.weights.find import find_model


class Copying(RemoteProgram):
    """Whose rows have the contents of those that are given."""

    def bind(self, rows: RowArrays) -> RowArrays:
        shared = super().bind(rows)
        shared.ids[:] = rows.ids
        for to, table in zip(shared.tables, rows.tables, strict=True):
            to[:] = table
        return shared


class StageThreads:
    """`program.remote.Others`, as threads."""

    def __init__(self, folder: str | Path, size: int, stages: int, dtype: str = "float32", **wish: Any):
        self._files = memory_file("ranks", segment_bytes(size, stages)), *map(memory_file, ("steps", "rows", "pipe"))
        segment, self.steps, self.rows, self.pipe = self._files
        places = [(rank, stage) for stage in reversed(range(stages)) for rank in range(size)]
        meshes = [SharedRank(segment, rank, size, False, 60.0, stage, stages) for rank, stage in places]
        self.mesh, files = meshes[0], find_model(str(folder))
        self.models = [load_model(files, dtype, options=LoadOptions("program", mesh=mesh, **wish)) for mesh in meshes]
        self._meshes = meshes
        self._pairs: list[tuple[Channel, Channel]] = []
        self._packing: list[tuple[Channel, Channel]] = []
        self._threads: list[threading.Thread] = []

    def program(self, exports: tuple[str, ...] = (), **options: Any) -> RemoteProgram:
        for mesh, model in zip(self._meshes[1:], self.models[1:], strict=True):
            program = staged(model, exports, samples=False, **options)
            pairs = Channel.pair(), Channel.pair()
            self._pairs.append(pairs[0])
            self._packing.append(pairs[1])
            follower = Follower(program, mesh, self.steps, self.rows, self.pipe, *(theirs for _, theirs in pairs))
            self._threads.append(threading.Thread(target=self._serve, args=(follower,), daemon=True))
            self._threads[-1].start()
        return Copying(staged(self.models[0], exports, **options), self)

    def _serve(self, follower: Follower) -> None:
        try:
            follower.serve()
        finally:
            self.mesh.abort()

    def send(self, message: Bytes) -> None:
        for own, _ in self._pairs:
            own.send(message)

    def receive(self) -> Sequence[Bytes]:
        return [own.receive() for own, _ in self._pairs]

    def ask(self, message: Bytes) -> Callable[[], Sequence[Bytes]]:
        for own, _ in self._packing:
            own.send(message)
        return lambda: [own.receive() for own, _ in self._packing]

    def lost(self) -> str:
        return "a thread failed"

    def close(self) -> None:
        self.mesh.abort()
        for thread in self._threads:
            thread.join()
        for own, theirs in (*self._pairs, *self._packing):
            own.close()
            theirs.close()
        for fd in self._files:
            os.close(fd)


def staged(
    model: LoadedModel, exports: tuple[str, ...] = (), *, blocks: int = 20, kv_dtype: str = "float32",
    threads: int = 1, rows: int = 128, **options: Any,
) -> StagedProgram:  # fmt: skip
    model = replace(model, trace=trace(model.model, exports))
    layout = held_layout(model)
    cache = NativeCache(layout, [blocks] * len(layout.groups), 16, kv_dtype)
    program = program_of(model, cache, max_tokens=rows, max_rows=8, max_positions=512, threads=threads, **options)
    assert isinstance(program, StagedProgram)
    return program


def staged_of(folder: str | Path, stages: int, size: int = 1, dtype: str = "float32", **wish: Any) -> RemoteProgram:
    return StageThreads(folder, size, stages, dtype, **wish).program()
