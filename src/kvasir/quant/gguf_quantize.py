"""Encodes float32 weights as GGUF tensors, for the formats that need no search for good scales.

Source: quantize_row_*_ref in ggml-quants.c and the bfloat16 rounding in ggml-impl.h of the ggml project; the bytes
equal those of the reference code.
"""

import numpy as np

from kvasir.errors import UnsupportedModel
from kvasir.quant.blocks import F32
from kvasir.quant.gguf_types import CHUNK, GGMLType


def quantize(values: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    """Encodes float32 [..., row] as uint8 [..., row bytes]: F32, F16, BF16, Q4_0 or Q8_0.

    Raises `UnsupportedModel` for other types and `ValueError` if a row is not a whole number of blocks.
    """
    encode = _ENCODERS.get(ggml_type)
    if encode is None:
        known = ", ".join(kind.name for kind in _ENCODERS)
        raise UnsupportedModel(f"quantizing to {ggml_type.name} is not supported", f"choose one of {known}")
    block_size = ggml_type.block_size
    if values.shape[-1] % block_size:
        raise ValueError(f"rows of {values.shape[-1]} do not divide into blocks of {block_size}")
    rows = np.ascontiguousarray(values, F32).reshape(-1, block_size)
    blocks = np.empty(len(rows), ggml_type.layout)
    step = CHUNK // block_size
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), step):
            encode(rows[start : start + step], blocks[start : start + step])
    return blocks.view(np.uint8).reshape(*values.shape[:-1], -1)


def _plain(rows: np.ndarray, blocks: np.ndarray) -> None:
    blocks[:] = rows[:, 0]


def _bf16(rows: np.ndarray, blocks: np.ndarray) -> None:
    """Rounds to nearest, ties to even; a NaN keeps its sign and payload and becomes quiet."""
    word = rows[:, 0].view(np.uint32)
    rounded = word + (0x7FFF + (word >> 16 & 1))
    is_nan = word & 0x7FFFFFFF > 0x7F800000
    blocks[:] = np.where(is_nan, word | 0x400000, rounded) >> 16


def _q4_0(rows: np.ndarray, blocks: np.ndarray) -> None:
    """The weight of largest magnitude, with its sign, becomes level 0 of 0..15, that is -8."""
    largest = np.take_along_axis(rows, np.abs(rows).argmax(axis=1, keepdims=True), axis=1)
    d = largest / F32.type(-8)
    levels = np.clip(rows * _inverse(d) + F32.type(8.5), 0, 15).astype(np.uint8)
    blocks["d"] = d[:, 0]
    blocks["qs"] = levels[:, :16] | levels[:, 16:] << 4


def _q8_0(rows: np.ndarray, blocks: np.ndarray) -> None:
    """The largest magnitude becomes 127; halves round away from zero."""
    d = np.abs(rows).max(axis=1, keepdims=True) / F32.type(127)
    scaled = rows * _inverse(d)
    magnitude = np.abs(scaled)
    whole = np.floor(magnitude)
    blocks["d"] = d[:, 0]
    blocks["qs"] = np.copysign(whole + (magnitude - whole >= 0.5), scaled)


def _inverse(d: np.ndarray) -> np.ndarray:
    return np.where(d == 0, F32.type(0), 1 / d)


_ENCODERS = {
    GGMLType.F32: _plain,
    GGMLType.F16: _plain,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q8_0: _q8_0,
}
