"""Self-test of a program: whether this machine computes batch-invariant bits, compared bit by bit."""

from __future__ import annotations

import numpy as np

from kvasir.layers.rows import RowArrays
from kvasir.program.program import Program


def run_program(program: Program) -> str:
    """Returns "exact" if a few rows through the whole program have the same bits in one chunk and in several chunks
    next to another sequence, else "close"; "untested" if the program or its cache is too small.

    Overwrites the first blocks of the cache, which must be free.
    """
    length, pieces = 21, (16, 1, 4)
    cache = program.cache
    blocks = -(-length // cache.block_size)
    limits = program.struct
    if min(cache.num_blocks) < 2 * blocks + 1 or limits.max_rows < 2 or limits.max_tokens < length:
        return "untested"
    rows = program.bind(RowArrays.empty(limits.max_rows, length, len(cache.groups), blocks))
    rows.ids[:2] = np.arange(2 * length).reshape(2, length) % max(1, program.vocab or 2)
    for table in rows.tables:
        table[:2] = np.arange(1, 1 + 2 * blocks).reshape(2, blocks)
    whole = _program_rows(program, [(0, 0, length)])
    start, parts = 0, []
    for count in pieces:
        parts.append(_program_rows(program, [(1, 0, 3), (0, start, count)])[3:])
        start += count
    return "exact" if np.array_equal(whole.view(np.uint32), np.concatenate(parts).view(np.uint32)) else "close"


def _program_rows(program: Program, works: list[tuple[int, int, int]]) -> np.ndarray:
    """The hidden states of works (row, start, count), [T, D]."""
    for piece, (row, start, count) in zip(program.pieces, works, strict=False):
        piece.row, piece.flags, piece.start, piece.count = row, 0, start, count
    program.run(len(works), max(start + count for _, start, count in works))
    return program.hidden(sum(count for *_, count in works)).copy()
