"""What rank 0 tells ranks in other processes about an adapter, on a channel of its own: it is packed while steps run.

Each rank is offered all changes, answers with what others need of it (`Offer`), and then packs its part (`Pack`).
"""

from __future__ import annotations

from typing import Any, Self

import ml_dtypes
import msgspec
import numpy as np

from kvasir.layers.adapters import Change, ModelChanges

_TYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    pass


class Pair(msgspec.Struct, array_like=True, frozen=True):
    """As layers.adapters.Change."""

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None
    bias: np.ndarray | None

    @classmethod
    def of(cls, change: Change) -> Self:
        return cls(change.a, change.b, change.scale, change.magnitude, change.bias)


class Rows(msgspec.Struct, array_like=True, frozen=True):
    """As layers.adapters.Replaced."""

    ids: tuple[int, ...]
    rows: np.ndarray


class Changes(msgspec.Struct, array_like=True, frozen=True):
    """As layers.adapters.ModelChanges."""

    matrices: dict[str, Pair]
    tables: dict[str, Pair]
    saved: dict[str, np.ndarray]
    tokens: dict[str, Rows]

    @classmethod
    def of(cls, changes: ModelChanges) -> Self:
        return cls(
            {name: Pair.of(change) for name, change in changes.matrices.items()},
            {name: Pair.of(change) for name, change in changes.tables.items()},
            dict(changes.saved),
            {name: Rows(tuple(rows.ids), rows.rows) for name, rows in changes.tokens.items()},
        )


class Squares(msgspec.Struct, array_like=True, frozen=True):
    """A rank's part of the sums of squares of a matrix's rows, whose columns [first, last) it has, or of a table's
    columns, whose ids [first, last) it has."""

    first: int
    last: int
    sums: np.ndarray


class Offer(_Message, frozen=True):
    """An adapter, which is kept by its key. Answered with the Squares of what a rank has a part of."""

    key: int
    changes: Changes


class Pack(_Message, frozen=True):
    """Packs an adapter that was offered. squares: of whole rows. Answered with Packed."""

    key: int
    squares: dict[str, np.ndarray]


class Offered(_Message, frozen=True):
    squares: dict[str, Squares]


class Packed(_Message, frozen=True):
    """rank, nbytes: as of a PackedAdapter."""

    rank: int
    nbytes: int


class Refused(_Message, frozen=True):
    """Why the adapter does not fit."""

    reason: str


def _encoded(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} in an adapter")
    return value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes()


def _decoded(kind: type, value: Any) -> Any:
    assert kind is np.ndarray, kind
    name, shape, data = value
    return np.frombuffer(data, _TYPES[name]).reshape(shape)


encode = msgspec.msgpack.Encoder(enc_hook=_encoded).encode
decode = msgspec.msgpack.Decoder(Offer | Pack, dec_hook=_decoded).decode
decode_answer = msgspec.msgpack.Decoder(Offered | Packed | Refused, dec_hook=_decoded).decode
