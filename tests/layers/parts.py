"""Batches of sequences that are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvasir.layers.batch import Batch, make_batch
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.rows import RowArrays
from kvasir.plan import Work


class Part(NamedTuple):
    """One sequence's tokens in a step, with a block table per cache group."""

    ids: Sequence[int]
    start: int
    tables: Sequence[Any]
    causal: bool = True
    adapter: int = 0


def batch_of(parts: Sequence[Part], cache: KVCache, **options: Any) -> Batch:
    """Each part in a row of its own."""
    ends = [part.start + len(part.ids) for part in parts]
    blocks = max((len(table) for part in parts for table in part.tables), default=0)
    rows = RowArrays.empty(len(parts), max(ends, default=0), len(cache.groups), blocks)
    works = []
    for row, part in enumerate(parts):
        rows.ids[row, part.start : ends[row]] = part.ids
        rows.adapters[row] = part.adapter
        for table, given in zip(rows.tables, part.tables, strict=True):
            table[row, : len(given)] = given
        works.append(Work(row, part.start, len(part.ids), indivisible=not part.causal))
    return make_batch(works, rows, cache, **options)
