"""The K-quants: super-blocks of 256 weights whose sub-blocks of 16 or 32 have small integer scales.

Source: block_q*_K in ggml-common.h and dequantize_row_q*_K in ggml-quants.c of the ggml project.
"""

import numpy as np

from kvasir.quant.blocks import F32, column, fields

Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])


def q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    out.reshape(-1, 2, 4, 32)[:] = fields(blocks["qs"], 32, 2)
    _scale_and_shift(blocks, out, blocks["scales"] & 15, blocks["scales"] >> 4)


def q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """A set mask bit means that 4 is *not* subtracted; scales have 6 bits, with the upper 2 stored separately."""
    levels = fields(blocks["qs"], 32, 2).reshape(-1, 256)
    mask = fields(blocks["hmask"], 32, 1).reshape(-1, 256)
    np.add(levels, mask << 2, out=out, casting="unsafe")
    out -= 4
    low = fields(blocks["scales"][:, :8], 8, 4).reshape(-1, 16)
    high = fields(blocks["scales"][:, 8:], 4, 2).reshape(-1, 16)
    _scale(blocks, out, (low | high << 4).astype(F32) - 32)


def q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    out.reshape(-1, 4, 2, 32)[:] = fields(blocks["qs"], 32, 4)
    _scale_and_shift(blocks, out, *six_bit_scales(blocks["scales"]))


def q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    low = fields(blocks["qs"], 32, 4).reshape(-1, 256)
    high = fields(blocks["qh"], 32, 1).reshape(-1, 256)
    np.bitwise_or(low, high << 4, out=out, casting="unsafe")
    _scale_and_shift(blocks, out, *six_bit_scales(blocks["scales"]))


def q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    low = fields(blocks["ql"], 64, 4).reshape(-1, 256)
    high = fields(blocks["qh"], 32, 2).reshape(-1, 256)
    np.bitwise_or(low, high << 4, out=out, casting="unsafe")
    out -= 32
    _scale(blocks, out, blocks["scales"].astype(F32))


def _scale(blocks: np.ndarray, out: np.ndarray, scales: np.ndarray) -> None:
    sub_blocks = out.reshape(*scales.shape, -1)
    sub_blocks *= column(column(blocks["d"]) * scales)


def _scale_and_shift(blocks: np.ndarray, out: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> None:
    _scale(blocks, out, scales)
    sub_blocks = out.reshape(*scales.shape, -1)
    sub_blocks -= column(column(blocks["dmin"]) * minima)


def six_bit_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 minima of Q4_K and Q5_K: uint8 [n, 12] -> two of uint8 [n, 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their lower 6 bits. Bytes 8-11 hold the lower nibbles of
    scales (low) and minima (high) 4-7; their upper 2 bits are the top bits of bytes 0-7.
    """
    scale, minimum, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([scale & 63, rest & 15 | scale >> 2 & 48], axis=1)
    minima = np.concatenate([minimum & 63, rest >> 4 | minimum >> 2 & 48], axis=1)
    return scales, minima
