"""Attention by relative position: learned biases of buckets (arXiv:2004.09297), slopes (arXiv:2108.12409), and
disentangled attention (arXiv:2006.03654). Their tables are computed once, on the host."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from kvasir.layers.module import Module
from kvasir.layers.places import Place
from kvasir.layers.vector import VectorLinear, VectorNorm, on_host
from kvasir.ops import native
from kvasir.ops.attention.relative import MAX_DIM, Relative, expand

MAX_HEAD_DIM = MAX_DIM  # of heads with disentangled attention


class Positions(Module):
    """What attention adds to its scores by relative position."""

    _tables: Relative | None = None

    def tables(self) -> Relative:
        """The tables; computed from the weights when they are first needed."""
        if self._tables is None:
            self._tables = self._compute()
        return self._tables

    def _compute(self) -> Relative:
        raise NotImplementedError(f"{type(self).__name__} computes no tables")


class PositionTable(Module):
    """A float32 table [rows, columns] on the host."""

    values: np.ndarray

    def __init__(self, rows: int, columns: int):
        self.rows, self.columns = rows, columns

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.rows, self.columns)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = place.exact(array)
        self.values = on_host(kept)
        return kept


# --- biases -----------------------------------------------------------------------------------------


class BucketBias(Positions):
    """A learned bias for each head and bucket of relative positions, as in T5 (arXiv:1910.10683): half of the buckets
    for each direction; of these, half for one distance each, the others for distances that grow by a constant factor up
    to `farthest`."""

    def __init__(self, buckets: int, heads: int, farthest: int):
        self.buckets, self.farthest = buckets, farthest
        self.table = PositionTable(buckets, heads)

    def _compute(self) -> Relative:
        half = self.buckets // 2
        distances = np.array([growing_bucket(n, half, self.farthest) for n in range(self.farthest + 1)])
        place = lambda away: distances[np.abs(away)] + half * (away > 0)  # noqa: E731
        return Relative(self.farthest, expand(self.table.values.T, self.farthest, place))


def growing_bucket(distance: int, buckets: int, farthest: int) -> int:
    """The bucket of a distance, of so many buckets: b0 + floor(log(distance / b0) / log(farthest / b0) * b0) from
    b0 = buckets / 2 on. Exact, in integers."""
    exact = buckets // 2
    if distance < exact:
        return distance
    growing, bucket = buckets - exact, exact
    while bucket + 1 < buckets and (
        distance**growing * exact ** (bucket + 1 - exact) >= farthest ** (bucket + 1 - exact) * exact**growing
    ):
        bucket += 1
    return bucket


class Slopes(Positions):
    """A bias of -slope * distance. Heads have the slopes 2^(-8 i / heads), i = 1 ...; other numbers than powers of two
    take those of the power below, and every second one of the power above. reach: the greatest distance."""

    def __init__(self, heads: int, reach: int):
        self.heads, self.reach = heads, reach

    def _compute(self) -> Relative:
        slopes_H1 = np.array(head_slopes(self.heads), np.float32)[:, None]
        distances = np.arange(self.reach + 1, dtype=np.float32)
        return Relative(self.reach, expand(-slopes_H1 * distances, self.reach, np.abs))


def head_slopes(heads: int) -> list[float]:
    """The slope of each head."""
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / below) for i in range(1, below + 1)]
    return slopes + [2.0 ** (-4.0 * i / below) for i in range(1, 2 * (heads - below), 2)]


# --- disentangled attention -------------------------------------------------------------------------


class Disentangled(Positions):
    """Queries meet the keys of relative positions, and keys the queries of relative positions. Both are projections of
    one table of embeddings, by the layer's own matrices.

    embeddings: [2 * span, D]. norm: over them, or None. to_keys, to_queries: which of the two parts there are. buckets:
    of relative positions in one direction, 0 for one each. farthest: the distance of the last bucket.
    """

    def __init__(
        self,
        embeddings: PositionTable,
        norm: VectorNorm | None,
        heads: int,
        *,
        to_keys: bool,
        to_queries: bool,
        buckets: int,
        farthest: int,
    ):
        width = embeddings.columns
        self.embeddings, self.norm = embeddings, norm
        self.key = VectorLinear(width, width) if to_keys else None
        self.query = VectorLinear(width, width) if to_queries else None
        self.heads, self.buckets, self.farthest = heads, buckets, farthest

    def _compute(self) -> Relative:
        x_PD = self.embeddings.values if self.norm is None else self.norm(self.embeddings.values)
        span = self.embeddings.rows // 2
        reach = span
        buckets = tuple(range(span + 1))
        if self.buckets:
            reach = self.farthest
            buckets = log_buckets(self.buckets, self.farthest)
        signed = np.minimum(np.array(buckets), span)

        def place(away: np.ndarray) -> np.ndarray:
            return np.clip(span - np.sign(away) * signed[np.abs(away)], 0, 2 * span - 1)

        def table(linear: VectorLinear | None) -> np.ndarray | None:
            if linear is None:
                return None
            projected_HdP = _project(linear, x_PD).T.reshape(self.heads, -1, 2 * span)
            return expand(projected_HdP, reach, place)

        found = Relative(reach, keys=table(self.key), queries=table(self.query))
        self.key = self.query = None  # only the tables are needed
        return found


@cache
def log_buckets(buckets: int, farthest: int) -> tuple[int, ...]:
    """The bucket of each distance up to `farthest`: itself up to half of the buckets, then half + ceil(log(distance /
    half) / log((farthest - 1) / half) * (half - 1)). Exact, in integers."""
    half, last, more = buckets // 2, farthest - 1, 0
    found = list(range(half + 1))
    for distance in range(half + 1, farthest + 1):
        while distance ** (half - 1) * half**more > last**more * half ** (half - 1):
            more += 1
        found.append(half + more)
    return tuple(found)


def _project(linear: VectorLinear, x_PD: np.ndarray) -> np.ndarray:
    """The linear layer on many rows: by the native kernel if it exists, whose bits are the same on every machine."""
    if not native.available():
        return linear(x_PD)
    from kvasir.ops.linear.native import product
    from kvasir.ops.linear.packed import pack_rows

    weight = np.ascontiguousarray(linear.weight.T)
    packed = pack_rows("F32", weight.view(np.uint8), linear.outputs, linear.inputs, 1)
    return product(packed, np.ascontiguousarray(x_PD), linear.bias)
