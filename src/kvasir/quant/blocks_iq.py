"""The IQ formats: super-blocks of 256 weights as indices of rows in a fixed grid, plus signs and scales.

Source: block_iq* in ggml-common.h and dequantize_row_iq* in ggml-quants.c of the ggml project. A grid row gives 8
magnitudes (IQ1, IQ2) or 4 (IQ3). The `_xxs` and `_xs` formats store 7 of 8 signs; the eighth makes the number of minus
signs even.
"""

import numpy as np

from kvasir.quant.blocks import F32, bits, column, fields, look_up
from kvasir.quant.iq_grids import grid

IQ1_S = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)])
IQ1_M = np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)])
IQ2_XXS = np.dtype([("d", "<f2"), ("group", [("qs", "u1", 4), ("signs", "<u4")], 8)])
IQ2_XS = np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])
IQ2_S = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)])
IQ3_XXS = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("signs", "<u4", 8)])
IQ3_S = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)])

_THREE_BITS = np.arange(0, 12, 3, dtype=np.uint16)
_SEVEN_BITS = np.arange(0, 28, 7, dtype=np.uint32)


def iq1_s(blocks: np.ndarray, out: np.ndarray) -> None:
    """qh holds, per 32 weights, the 3 upper bits of four indices, a 3-bit scale and the sign of the shift."""
    high = blocks["qh"][..., None] >> _THREE_BITS & 7
    _grid_rows("IQ1_S", _joined(blocks["qs"], high), out)
    sub_blocks = out.reshape(-1, 8, 32)
    sub_blocks += _shift(blocks["qh"] & 0x8000)
    scales = 2 * (blocks["qh"] >> 12 & 7) + 1
    sub_blocks *= column(column(blocks["d"]) * scales)


def iq1_m(blocks: np.ndarray, out: np.ndarray) -> None:
    """A nibble of qh belongs to 8 weights: 3 upper index bits and the sign of the shift.

    Each of the four words of `scales` holds four 3-bit scales and, in the upper 4 bits, a quarter of the float16 scale.
    """
    nibbles = fields(blocks["qh"], 1, 4).reshape(-1, 32)
    _grid_rows("IQ1_S", _joined(blocks["qs"], nibbles & 7), out)
    rows = out.reshape(-1, 32, 8)
    rows += _shift(nibbles & 8)
    words = blocks["scales"]
    quarters = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    d = np.bitwise_or.reduce(quarters, axis=1).view("<f2")
    scales = 2 * (words[..., None] >> _THREE_BITS & 7).reshape(-1, 16) + 1
    sub_blocks = out.reshape(-1, 16, 16)
    sub_blocks *= column(column(d) * scales)


def iq2_xxs(blocks: np.ndarray, out: np.ndarray) -> None:
    _grid_rows("IQ2_XXS", blocks["group"]["qs"], out)
    _packed_signs_and_scales(blocks["d"], blocks["group"]["signs"], 0.25, out)


def iq2_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    _grid_rows("IQ2_XS", blocks["qs"] & 511, out)
    _apply_signs(_EVEN_SIGNS[blocks["qs"] >> 9], out)
    _half_step_scales(blocks, out)


def iq2_s(blocks: np.ndarray, out: np.ndarray) -> None:
    high = fields(blocks["qh"], 1, 2)
    _grid_rows("IQ2_S", _joined(blocks["qs"], high), out)
    _apply_signs(blocks["signs"], out)
    _half_step_scales(blocks, out)


def iq3_xxs(blocks: np.ndarray, out: np.ndarray) -> None:
    _grid_rows("IQ3_XXS", blocks["qs"], out)
    _packed_signs_and_scales(blocks["d"], blocks["signs"], 0.5, out)


def iq3_s(blocks: np.ndarray, out: np.ndarray) -> None:
    _grid_rows("IQ3_S", _joined(blocks["qs"], bits(blocks["qh"])), out)
    _apply_signs(blocks["signs"], out)
    scales = 2 * fields(blocks["scales"], 1, 4).reshape(-1, 8) + 1
    sub_blocks = out.reshape(-1, 8, 32)
    sub_blocks *= column(column(blocks["d"]) * scales)


def _joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Grid indices from their lower 8 bits [n, rows] and their upper bits [n, ...], equal in number."""
    return low | high.reshape(low.shape).astype(np.uint16) << 8


def _grid_rows(name: str, index: np.ndarray, out: np.ndarray) -> None:
    table = grid(name)
    look_up(table, index, out.reshape(*index.shape, table.shape[1]))


def _shift(negative: np.ndarray) -> np.ndarray:
    """The offset that the IQ1 formats add to each grid entry: -1/8 where `negative` is not 0, else 1/8."""
    return np.where(negative, np.float32(-0.125), np.float32(0.125))[..., None]


def _apply_signs(sign_bytes: np.ndarray, out: np.ndarray) -> None:
    """Multiplies each run of 8 weights by the signs in one byte (a set bit is minus)."""
    rows = out.reshape(*sign_bytes.shape, 8)
    rows *= _SIGNS[sign_bytes]


def _packed_signs_and_scales(d: np.ndarray, words: np.ndarray, unit: float, out: np.ndarray) -> None:
    """The _xxs formats' word per 32 weights: four groups of 7 signs, and a scale in the upper 4 bits."""
    _apply_signs(_EVEN_SIGNS[words[..., None] >> _SEVEN_BITS & 127], out)
    scales = (F32.type(0.5) + (words >> 28).astype(F32)) * F32.type(unit)
    sub_blocks = out.reshape(-1, 8, 32)
    sub_blocks *= column(column(d) * scales)


def _half_step_scales(blocks: np.ndarray, out: np.ndarray) -> None:
    """4-bit scales of 16 weights each: from 1/8 in steps of 1/4."""
    nibbles = fields(blocks["scales"], 1, 4).reshape(-1, 16)
    scales = (F32.type(0.5) + nibbles.astype(F32)) * F32.type(0.25)
    sub_blocks = out.reshape(-1, 16, 16)
    sub_blocks *= column(column(blocks["d"]) * scales)


def _even_signs() -> np.ndarray:
    """Seven sign bits, plus the eighth that makes their number even: uint8 [128]."""
    seven = np.arange(128, dtype=np.uint8)
    parity = np.unpackbits(seven[:, None], axis=1).sum(axis=1, dtype=np.uint8) & 1
    return seven | parity << 7


_EVEN_SIGNS = _even_signs()
_SIGNS = 1 - 2 * bits(np.arange(256, dtype=np.uint8)[:, None]).astype(F32)
