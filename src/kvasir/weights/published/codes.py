"""Numbers out of packed bits: the codes that published formats store, as NumPy arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kvasir.quant.gguf_types import GGMLType

OWN_GROUP = 64  # columns of a block of the engine's own types
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # FP4


def nibbles(data: np.ndarray) -> np.ndarray:
    """uint8 [.., n] -> uint8 [.., 2 n], the low nibble of a byte first."""
    return np.stack((data & 15, data >> 4), axis=-1).reshape(*data.shape[:-1], -1)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes in a stream of bits, the lowest first: 32-bit words [.., n] -> uint8 [.., 32 n / bits]."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    if bits == 4:
        return nibbles(data)
    streams = np.unpackbits(data, axis=-1, bitorder="little")
    codes = streams.reshape(*data.shape[:-1], -1, bits)
    return (codes << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def powers(exponents: np.ndarray) -> np.ndarray:
    """E8M0 numbers, 2^(e - 127), as float32."""
    return exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def spread(scales: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """Scales of blocks, one for each element of a matrix."""
    rows, cols = shape
    return scales.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :cols]


def to_mxfp4_blocks(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """GGML's MXFP4 rows, uint8 [rows, 17 bytes per 32 values]. codes: FP4, uint8 [rows, cols]. exponents: uint8
    [rows, cols / 32]."""
    halves = codes.reshape(len(codes), -1, 2, 16)
    blocks = np.concatenate((exponents[..., None], halves[:, :, 0] | halves[:, :, 1] << 4), axis=-1)
    return blocks.reshape(len(codes), -1)


def to_q4_0_blocks(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """GGML's Q4_0 rows, uint8 [rows, 18 bytes per 32 values]. codes: value / scale + 8. scales: float16 [rows,
    cols / 32]."""
    halves = codes.reshape(len(codes), -1, 2, 16)
    scales = np.ascontiguousarray(scales)[..., None].view(np.uint8)
    blocks = np.concatenate((scales, halves[:, :, 0] | halves[:, :, 1] << 4), axis=-1)
    return blocks.reshape(len(codes), -1)


def to_q8_0_blocks(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """GGML's Q8_0 rows, uint8 [rows, 34 bytes per 32 values]. values: value / scale, int8. scales: float16 [rows,
    cols / 32]."""
    scales = np.ascontiguousarray(scales)[..., None].view(np.uint8)
    groups = values.astype(np.int8).view(np.uint8).reshape(len(values), -1, 32)
    return np.concatenate((scales, groups), axis=-1).reshape(len(values), -1)


def to_q4_1_blocks(codes: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """GGML's Q4_1 rows, uint8 [rows, 20 bytes per 32 values]: value = code * scale + minimum. scales, minima: float16
    [rows, cols / 32]."""
    halves = codes.reshape(len(codes), -1, 2, 16)
    pairs = np.ascontiguousarray(np.stack((scales, minima), axis=-1)).view(np.uint8)
    return np.concatenate((pairs, halves[:, :, 0] | halves[:, :, 1] << 4), axis=-1).reshape(len(codes), -1)


def to_own_blocks(kind: str, codes: np.ndarray, **numbers: np.ndarray) -> np.ndarray:
    """Rows of one of the engine's own types (kvasir.quant.blocks_own), uint8 [rows, bytes]. codes: uint8 [rows, cols].
    numbers: the other fields of its blocks, [rows, blocks], or anything that broadcasts to that."""
    layout = GGMLType[kind].layout
    blocks = np.empty((len(codes), codes.shape[1] // GGMLType[kind].block_size), layout)
    blocks["qs"] = codes.reshape(*blocks.shape, -1)
    for name, values in numbers.items():
        blocks[name] = values
    return blocks.view(np.uint8)


def exact_halves(scales: np.ndarray) -> np.ndarray | None:
    """The scales as float16 if all are numbers that float16 has, else None."""
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    return halves if np.array_equal(halves.astype(np.float32), scales.astype(np.float32)) else None


def group_order(index: np.ndarray, groups: int) -> np.ndarray | None:
    """The columns by group (int32), those of a group in their order; None unless all groups have as many. index: the
    group of each column."""
    if (np.bincount(index, minlength=groups) != len(index) // groups).any():
        return None
    return np.argsort(index, kind="stable").astype(np.int32)
