"""Shared helpers of the GGML block decoders.

A decoder is a function `decode(blocks, out)`: `blocks` is a structured array [n] whose dtype is the block's layout in
the file; `out` is float32 [n, weights per block], C-contiguous, and is overwritten. Decoders use `out` as working
memory, so that a chunk stays in the cache while it is decoded.

All products that the formats define (scale * sub-scale * level) fit in 24 bits and are exact in float32, so their order
is free; only adding or subtracting a minimum rounds, once.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

Decoder: TypeAlias = Callable[[np.ndarray, np.ndarray], None]

F32 = np.dtype("<f4")


def column(values: np.ndarray) -> np.ndarray:
    """Scales of any dtype and shape [n, ...] as float32 [n, ..., 1], to multiply rows with."""
    return values.astype(F32)[..., None]


def fields(packed: np.ndarray, width: int, bits: int) -> np.ndarray:
    """Unpacks bytes whose `bits`-wide fields belong to different rows of `width` elements, lowest bits first.

    uint8 [n, groups * width] -> uint8 [n, groups, 8 // bits, width].
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, width) >> shifts) & np.uint8((1 << bits) - 1)


def bits(packed: np.ndarray) -> np.ndarray:
    """Single bits, lowest first: uint8 [n, bytes] -> uint8 of 0 and 1 [n, 8 * bytes]."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def look_up(table: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """out = table[index], for an index known to be in range (clip mode avoids a buffer in numpy)."""
    np.take(table, index, axis=0, out=out, mode="clip")
