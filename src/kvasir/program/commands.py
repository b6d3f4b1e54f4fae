"""What rank 0 tells ranks in other processes: steps through shared memory, everything else in messages.

A step takes no message: rank 0 writes its pieces to shared memory (`StepMemory`) and gives a command; the rows' ids and
block tables lie in memory that all ranks map (`map_rows`). CALL announces a message, which every rank answers.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any, Self

import msgspec
import numpy as np

from kvasir.layers.rows import RowArrays
from kvasir.ops.attention.native import PIECE_BIDIRECTIONAL, Piece
from kvasir.parallel import MAX_STAGES
from kvasir.program.native import RowState, records
from kvasir.program.program import Program

STEP, LOGITS, CALL = 1, 2, 3
LEAST = 64  # token rows of a part of a step, which is worth another pass over the weights
PARTS = 2  # of a step for each stage, at most: more parts leave stages idle for a shorter time
MAX_ROWS_OF_LOGITS = 32
_HEADER = 8  # numbers
_TAIL = RowState.adapters.offset  # the rest of a RowState is the row's adapters, and how far its states are
_PIECE = np.dtype(Piece)
_MAX_PARTS = PARTS * MAX_STAGES


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
    """Writes a process's shard of a block; the others do nothing."""

    group: int
    block: int
    number: int
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
    as of a Program.

    Stages compute a step in parts. divided: the pieces of all parts, of which some are cut. ends: of each part. whole:
    whether there is one part.
    """

    def __init__(self, fd: int, max_rows: int, max_tokens: int, whole: bool = False):
        self.whole = whole
        parts = {
            "header": np.zeros(_HEADER, np.int64),
            "chosen": np.zeros(MAX_ROWS_OF_LOGITS, np.int64),
            "types": np.zeros(max_tokens, np.int64),
            "pieces": np.zeros(max_rows, _PIECE),
            "tails": np.zeros((max_rows, _row_bytes() - _TAIL), np.uint8),
            "divided": np.zeros(max_rows + _MAX_PARTS, _PIECE),
            "ends": np.zeros(_MAX_PARTS, np.int64),
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
    divided: np.ndarray
    ends: np.ndarray

    @property
    def command(self) -> tuple[int, int, int]:
        """(STEP, pieces, end of the positions), (LOGITS, rows, 0) or (CALL, 0, 0)."""
        kind, count, end = self.header[:3].tolist()
        return kind, count, end

    def write(self, kind: int, count: int = 0, end: int = 0) -> None:
        self.header[:3] = kind, count, end

    def write_step(self, program: Any, count: int, end: int, stages: int) -> int:
        """Writes a step of the program's first `count` pieces; returns the number of its parts, 0 for one stage."""
        pieces = self.pieces[:count] = records(program.pieces, Piece)[:count]
        self.tails[:count] = _bytes_of(program.states)[pieces["row"], _TAIL:]
        if program.types is not None:
            tokens = int(pieces["count"].sum())
            self.types[:tokens] = program.types[:tokens]
        self.write(STEP, count, end)
        if stages == 1:
            return 0
        found, ends = (pieces, [count]) if self.whole else divide(pieces, stages)
        self.divided[: len(found)], self.ends[: len(ends)] = found, ends
        self.header[3] = len(ends)
        return len(ends)

    def read_states(self, program: Program) -> None:
        """Gives a program what it must know of the rows of the step."""
        count = self.header[1]
        _bytes_of(program.states)[self.pieces["row"][:count], _TAIL:] = self.tails[:count]

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The pieces of each part of the step, and the types of its tokens."""
        first = token = 0
        for last in self.ends[: self.header[3]].tolist():
            pieces = self.divided[first:last]
            tokens = int(pieces["count"].sum())
            yield pieces, self.types[token : token + tokens]
            first, token = last, token + tokens

    def read_step(self, program: Any, count: int) -> None:
        """Gives the step to the program of another rank."""
        pieces = records(program.pieces, Piece)
        pieces[:count] = self.pieces[:count]
        self.read_states(program)
        if program.types is not None:
            tokens = int(pieces["count"][:count].sum())
            program.types[:tokens] = self.types[:tokens]


def divide(pieces: np.ndarray, stages: int) -> tuple[np.ndarray, list[int]]:
    """A step's pieces in parts with about equal numbers of token rows, and the end of each part among them. A piece
    goes to several parts, unless its rows all see each other."""
    total = int(pieces["count"].sum())
    wanted = max(1, min(total // LEAST, PARTS * stages, _MAX_PARTS))
    if wanted == 1:
        return pieces, [len(pieces)]
    found: list[np.ndarray] = []
    ends: list[int] = []
    borders, row = [total * (part + 1) // wanted for part in range(wanted)], 0
    for piece in pieces:
        left = piece.copy()
        while left["count"] > 0:
            room = borders[len(ends)] - row
            taken = left.copy()
            if not piece["flags"] & PIECE_BIDIRECTIONAL:
                taken["count"] = min(room, left["count"])
            left["start"] += taken["count"]
            left["count"] -= taken["count"]
            row += int(taken["count"])
            found.append(taken)
            if row >= borders[len(ends)]:
                ends.append(len(found))
                borders[len(ends) :] = [max(border, row + 1) for border in borders[len(ends) :]]
    if ends[-1:] != [len(found)]:
        ends.append(len(found))
    return np.array(found, pieces.dtype), ends


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
