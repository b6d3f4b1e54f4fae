"""What rank 0 tells ranks in other processes: steps through shared memory, everything else in messages.

A step takes no message: rank 0 writes its pieces to shared memory (`StepMemory`) and gives a command; the rows' ids and
block tables lie in memory that all ranks map (`map_rows`). CALL announces a message, which every rank answers.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, Self

import msgspec
import numpy as np

from kvasir.layers.rows import RowArrays
from kvasir.ops.attention.native import Piece
from kvasir.program.native import RowState, records
from kvasir.program.program import Program

STEP, LOGITS, CALL = 1, 2, 3
MAX_ROWS_OF_LOGITS = 32
_HEADER = 8  # numbers
_TAIL = RowState.adapters.offset  # the rest of a RowState is the row's adapters, and how far its states are
_PIECE = np.dtype(Piece)


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    pass


class RowShape(_Message, frozen=True):
    """The sizes of a runner's rows: see RowArrays. Answered once they are bound."""

    rows: int
    ids: int
    groups: int
    blocks: int

    @classmethod
    def of(cls, arrays: RowArrays) -> Self:
        rows, ids = arrays.ids.shape
        return cls(rows, ids, len(arrays.tables), arrays.tables[0].shape[1] if arrays.tables else 0)

    @property
    def nbytes(self) -> int:
        return 4 * self.rows * (self.ids + self.groups * self.blocks + 1)


class CopyBlocks(_Message, frozen=True):
    """Copies (source, target) blocks of a group."""

    group: int
    pairs: list[tuple[int, int]]


class ExportBlock(_Message, frozen=True):
    """Answered with a block's bytes."""

    group: int
    block: int


class ImportBlock(_Message, frozen=True):
    """Writes a rank's shard of a block; the others do nothing."""

    group: int
    block: int
    rank: int
    data: bytes


class FillCache(_Message, frozen=True):
    """Fills all blocks with a number."""

    value: float


class SetAdapter(_Message, frozen=True):
    """Installs a packed adapter, by its key, or removes what has this id (None). rank: for which there must be room.
    dropped: keys of packed adapters that no longer exist."""

    adapter: int
    key: int | None
    rank: int
    dropped: list[int]


Message = RowShape | CopyBlocks | ExportBlock | ImportBlock | FillCache | SetAdapter
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


class StepMemory:
    """Where rank 0 writes the steps of all. fd: a file in memory, which grows to what is needed. max_rows, max_tokens:
    as of a Program."""

    def __init__(self, fd: int, max_rows: int, max_tokens: int):
        parts = {
            "header": np.zeros(_HEADER, np.int64),
            "chosen": np.zeros(MAX_ROWS_OF_LOGITS, np.int64),
            "types": np.zeros(max_tokens, np.int64),
            "pieces": np.zeros(max_rows, _PIECE),
            "tails": np.zeros((max_rows, _row_bytes() - _TAIL), np.uint8),
        }
        size = sum(part.nbytes for part in parts.values())
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        memory, at = mmap.mmap(fd, size), 0
        for name, part in parts.items():
            found = np.frombuffer(memory, part.dtype, part.size, at).reshape(part.shape)
            setattr(self, name, found)
            at += part.nbytes

    header: np.ndarray
    chosen: np.ndarray
    types: np.ndarray
    pieces: np.ndarray
    tails: np.ndarray

    @property
    def command(self) -> tuple[int, int, int]:
        """(STEP, pieces, end of the positions), (LOGITS, rows, 0) or (CALL, 0, 0)."""
        kind, count, end = self.header[:3].tolist()
        return kind, count, end

    def write(self, kind: int, count: int = 0, end: int = 0) -> None:
        self.header[:3] = kind, count, end

    def write_step(self, program: Program, count: int, end: int) -> None:
        """Writes a step of the program's first `count` pieces."""
        pieces = self.pieces[:count] = records(program.pieces, Piece)[:count]
        self.tails[:count] = _bytes_of(program.states)[pieces["row"], _TAIL:]
        if program.types is not None:
            tokens = int(pieces["count"].sum())
            self.types[:tokens] = program.types[:tokens]
        self.write(STEP, count, end)

    def read_step(self, program: Program, count: int) -> None:
        """Gives the step to the program of another rank."""
        pieces = records(program.pieces, Piece)
        pieces[:count] = self.pieces[:count]
        _bytes_of(program.states)[pieces["row"][:count], _TAIL:] = self.tails[:count]
        if program.types is not None:
            tokens = int(pieces["count"][:count].sum())
            program.types[:tokens] = self.types[:tokens]


def _row_bytes() -> int:
    return np.dtype(RowState).itemsize


def _bytes_of(states: Any) -> np.ndarray:
    """The rows of an array of RowState, as bytes."""
    return np.frombuffer(states, np.uint8).reshape(-1, _row_bytes())


def map_rows(fd: int, shape: RowShape) -> RowArrays:
    """Rows in a file in memory, which has at least their bytes."""
    numbers = np.frombuffer(mmap.mmap(fd, shape.nbytes), np.int32)
    each = shape.rows * shape.blocks
    ids, *tables, seconds = np.split(
        numbers, [shape.rows * shape.ids + i * each for i in range(shape.groups + 1)]
    )  # fmt: skip
    return RowArrays(
        ids.reshape(shape.rows, -1), tuple(table.reshape(shape.rows, -1) for table in tables), seconds
    )  # fmt: skip
