"""GGML blocks of 32 (or 128, or 256) weights with one scale, without sub-scales.

Source: block_* in ggml-common.h and dequantize_row_* in ggml-quants.c of the ggml project. In the 4- and 5-bit formats
the low nibbles of a block are its first half, the high nibbles its second.
"""

import numpy as np

from kvasir.quant.blocks import bits, column, fields

Q1_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])
Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])
Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])
Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])
Q8_K = np.dtype([("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)])
TQ1_0 = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])
TQ2_0 = np.dtype([("qs", "u1", 64), ("d", "<f2")])


def q1_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = bits(blocks["qs"])
    out *= 2
    out -= 1
    out *= column(blocks["d"])


def q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks, out)
    out -= 8
    out *= column(blocks["d"])


def q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks, out)
    out *= column(blocks["d"])
    out += column(blocks["m"])


def q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _five_bits(blocks, out)
    out -= 16
    out *= column(blocks["d"])


def q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _five_bits(blocks, out)
    out *= column(blocks["d"])
    out += column(blocks["m"])


def q8(blocks: np.ndarray, out: np.ndarray) -> None:
    """Q8_0 and Q8_K; ignores the sums that Q8_K stores for dot products."""
    out[:] = blocks["qs"]
    out *= column(blocks["d"])


def tq1_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Five ternary digits per byte: digit k of adjacent bytes gives adjacent weights."""
    start = 0
    for packed, digits in ((blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4)):
        for table in _TRITS[:digits]:
            stop = start + packed.shape[1]
            out[:, start:stop] = table[packed]
            start = stop
    out *= column(blocks["d"])


def tq2_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out.reshape(-1, 2, 4, 32)[:] = fields(blocks["qs"], 32, 2)
    out -= 1
    out *= column(blocks["d"])


def _nibbles(blocks: np.ndarray, out: np.ndarray) -> None:
    out.reshape(-1, 1, 2, 16)[:] = fields(blocks["qs"], 16, 4)


def _five_bits(blocks: np.ndarray, out: np.ndarray) -> None:
    high = bits(blocks["qh"]) << np.uint8(4)
    np.bitwise_or(fields(blocks["qs"], 16, 4).reshape(-1, 32), high, out=out, casting="unsafe")


def _trits() -> np.ndarray:
    """The digits of every byte in TQ1_0's base-3 fraction code: float32 [5 digits, 256 bytes] of -1, 0, 1."""
    byte = np.arange(256)
    return np.stack([((byte * 3**k & 255) * 3 >> 8) - 1 for k in range(5)]).astype(np.float32)


_TRITS = _trits()
