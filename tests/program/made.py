"""Programs over random models, driven without a runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir.layers.kv_layout import KVLayout
from kvasir.layers.rows import RowArrays
from kvasir.ops.attention.native import PIECE_BIDIRECTIONAL
from kvasir.plan import Adapted
from kvasir.program.cache import NativeCache
from kvasir.program.program import Program
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.weights.find import find_model
from tests.engine.cores import CONFIGS, random_model
from tests.models.families import FEW

SMALL = [kind for kind in CONFIGS if CONFIGS[kind]["vocab_size"] < 10000]
EACH = [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in SMALL]


def only(*few: str, but: str = "") -> list[Any]:
    """All kinds of SMALL except for `but`, for a parameter; those that are not named are slow."""
    assert {*few} <= {*SMALL}
    return [kind if kind in few else pytest.param(kind, marks=pytest.mark.slow) for kind in SMALL if kind != but]


def loaded(kind: str, folder: Path, dtype: str = "float32", **wish: Any) -> LoadedModel:
    return load_model(find_model(random_model(kind, folder)), dtype, options=LoadOptions("program", **wish))


def program_of(
    model: LoadedModel, *, kv_dtype: str = "float32", blocks: int = 20, block_size: int = 16, rows: int = 128,
    threads: int = 1, fill: float | None = None, max_rows: int = 8, **options: Any,
) -> Program:  # fmt: skip
    assert model.trace is not None
    spec = model.model.cache_spec()
    groups = len(KVLayout.of(spec).groups)
    cache = NativeCache(spec, [blocks] * groups, block_size, kv_dtype)
    if fill is not None:
        cache.fill_(fill)
    return Program(
        model.trace, cache, max_tokens=rows, max_rows=max_rows, max_positions=512, threads=threads, **options
    )


class Driver:
    """One sequence in row 0 of a program, with the blocks 1, 2, ..."""

    def __init__(self, program: Program, ids: list[int]):
        self.program = program
        blocks = program.cache.num_blocks[0]
        self.rows = RowArrays.empty(1, 512, len(program.cache.groups), blocks - 1)
        self.ids = self.rows.ids[0]
        self.ids[: len(ids)] = ids
        for table in self.rows.tables:
            table[0] = range(1, blocks)
        self.table = self.rows.tables[0][0]
        program.bind(self.rows)

    def hidden(self, start: int, count: int, bidirectional: bool = False) -> np.ndarray:
        """The hidden rows of tokens [start, start + count), computed in one step."""
        piece = self.program.pieces[0]
        piece.row, piece.start, piece.count = 0, start, count
        piece.flags = PIECE_BIDIRECTIONAL * bidirectional
        self.program.run(1, start + count)
        return self.program.hidden(count).copy()

    def logits(self, start: int, count: int) -> np.ndarray:
        self.hidden(start, count)
        return np.concatenate(
            [self.program.logits_of(range(i, min(i + 32, count))).copy() for i in range(0, count, 32)]
        )


class Company:
    """Several sequences in rows 0, 1, ... of a program, each with its own blocks and perhaps adapters: an id, 0 for
    none, or a list."""

    def __init__(self, program: Program, sequences: Sequence[list[int]], adapters: Sequence[int | list[Adapted]] = ()):
        self.program = program
        blocks = (program.cache.num_blocks[0] - 1) // len(sequences)
        rows = RowArrays.empty(len(sequences), max(map(len, sequences)) + 1, len(program.cache.groups), blocks)
        for table in rows.tables:
            table[:] = np.arange(1, 1 + len(sequences) * blocks).reshape(-1, blocks)
        for i, ids in enumerate(sequences):
            rows.ids[i, : len(ids)] = ids
            given = adapters[i] if adapters else 0
            program.states[i].adapt([Adapted(given)] * (given > 0) if isinstance(given, int) else given)
        program.bind(rows)

    def step(self, *works: tuple[int, int, int], export: str = "") -> list[np.ndarray]:
        """Computes works (row, start, count) together. Returns the hidden rows of each: the last ones, or a named
        output."""
        for item, (row, start, count) in zip(self.program.pieces, works, strict=False):
            item.row, item.flags, item.start, item.count = row, 0, start, count
        self.program.run(len(works), max(start + count for _, start, count in works))
        ends = np.cumsum([count for *_, count in works])
        rows = self.program.export(export, ends[-1]) if export else self.program.hidden(ends[-1])
        return np.split(rows.copy(), ends[:-1])


def bits(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint32)
