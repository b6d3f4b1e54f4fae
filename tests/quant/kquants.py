"""Float32 weights as blocks of the GGUF formats, rounded plainly, without a search for good scales: for tests.

The gguf package encodes the simple formats. What it leaves out is here: K-quants and IQ4, by their least and largest
weights. The layouts are those that `kvasir.quant` decodes.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np

from kvasir.quant.gguf_types import GGMLType

IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def quantize(values: np.ndarray, name: str) -> np.ndarray:
    """float32 [..., row] -> uint8 [..., row bytes] of GGML type `name`; rows are whole blocks."""
    encode = _ENCODERS.get(name)
    if encode is None:
        return np.ascontiguousarray(gguf.quantize(values, gguf.GGMLQuantizationType[name])).view(np.uint8)
    kind = GGMLType[name]
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, kind.block_size)
    blocks = np.zeros(len(rows), kind.layout)
    encode(rows, blocks)
    return blocks.view(np.uint8).reshape(*values.shape[:-1], -1)


# --- the formats ------------------------------------------------------------------------------------


def _q1_0(rows: np.ndarray, blocks: np.ndarray) -> None:
    blocks["d"] = np.abs(rows).mean(1)
    blocks["qs"] = np.packbits(rows >= 0, axis=1, bitorder="little")


def _q2_k(rows: np.ndarray, blocks: np.ndarray) -> None:
    scales, minima, levels = _scale_and_shift(rows, blocks, 16, 15, 3)
    blocks["scales"] = scales | minima << 4
    blocks["qs"] = _packed(levels, 32, 2)


def _q3_k(rows: np.ndarray, blocks: np.ndarray) -> None:
    scales, levels = _scale(rows, blocks, 16, 31, 4)
    scales, levels = (scales + 32).astype(np.uint8), (levels + 4).astype(np.uint8)
    blocks["qs"] = _packed(levels & 3, 32, 2)
    blocks["hmask"] = _packed(levels >> 2, 32, 1)
    blocks["scales"] = np.concatenate([_packed(scales & 15, 8, 4), _packed(scales >> 4, 4, 2)], axis=1)


def _q4_k(rows: np.ndarray, blocks: np.ndarray) -> None:
    scales, minima, levels = _scale_and_shift(rows, blocks, 32, 63, 15)
    blocks["scales"] = _six_bits(scales, minima)
    blocks["qs"] = _packed(levels, 32, 4)


def _q5_k(rows: np.ndarray, blocks: np.ndarray) -> None:
    scales, minima, levels = _scale_and_shift(rows, blocks, 32, 63, 31)
    blocks["scales"] = _six_bits(scales, minima)
    blocks["qs"] = _packed(levels & 15, 32, 4)
    blocks["qh"] = _packed(levels >> 4, 32, 1)


def _q6_k(rows: np.ndarray, blocks: np.ndarray) -> None:
    scales, levels = _scale(rows, blocks, 16, 127, 32)
    levels = (levels + 32).astype(np.uint8)
    blocks["scales"] = scales
    blocks["ql"] = _packed(levels & 15, 64, 4)
    blocks["qh"] = _packed(levels >> 4, 32, 2)


def _iq4_nl(rows: np.ndarray, blocks: np.ndarray) -> None:
    blocks["d"] = _signed_largest(rows) / IQ4_LEVELS[0]
    blocks["qs"] = _packed(_nearest(_divided(rows, blocks["d"].astype(np.float32)[:, None])), 16, 4)


def _iq4_xs(rows: np.ndarray, blocks: np.ndarray) -> None:
    scales, divided = _sub_scales(rows, blocks, 32, 31, IQ4_LEVELS[0])
    scales = (scales + 32).astype(np.uint16)
    blocks["qs"] = _packed(_nearest(divided).reshape(rows.shape), 16, 4)
    blocks["scales_l"] = _packed((scales & 15).astype(np.uint8), 1, 4)
    blocks["scales_h"] = ((scales >> 4) << np.arange(0, 16, 2, dtype=np.uint16)).sum(1)


# --- what they share --------------------------------------------------------------------------------


def _scale(rows: np.ndarray, blocks: np.ndarray, size: int, most: int, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Levels in -top to top - 1 of sub-blocks of `size`, under integer scales up to `most`; sets d.

    float32 scales [n, sub-blocks], levels [n, block].
    """
    scales, divided = _sub_scales(rows, blocks, size, most, -top)
    return scales, np.clip(np.rint(divided), -top, top - 1).reshape(rows.shape)


def _sub_scales(
    rows: np.ndarray, blocks: np.ndarray, size: int, most: int, end: float
) -> tuple[np.ndarray, np.ndarray]:
    """Scales under which each sub-block's largest weight meets the level `end`, and the weights divided by them."""
    subs = rows.reshape(len(rows), -1, size)
    wanted = _signed_largest(subs) / end
    blocks["d"] = np.abs(wanted).max(1) / most
    d = blocks["d"].astype(np.float32)[:, None]
    scales = np.clip(np.rint(_divided(wanted, d)), -most, most)
    return scales, _divided(subs, (d * scales)[..., None])


def _scale_and_shift(
    rows: np.ndarray, blocks: np.ndarray, size: int, most: int, top: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Levels in 0 to top between the least weight (0 at most) and the largest of each sub-block; sets d and dmin.

    uint8 scales and minima [n, sub-blocks], levels [n, block].
    """
    subs = rows.reshape(len(rows), -1, size)
    below = np.maximum(-subs.min(-1), 0)
    steps = np.maximum(subs.max(-1) + below, 0) / top
    blocks["d"], blocks["dmin"] = steps.max(1) / most, below.max(1) / most
    d, dmin = (blocks[name].astype(np.float32)[:, None] for name in ("d", "dmin"))
    scales, minima = (np.clip(np.rint(_divided(x, unit)), 0, most) for x, unit in ((steps, d), (below, dmin)))
    levels = np.clip(np.rint(_divided(subs + (dmin * minima)[..., None], (d * scales)[..., None])), 0, top)
    return scales.astype(np.uint8), minima.astype(np.uint8), levels.astype(np.uint8).reshape(rows.shape)


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """The 12 bytes of Q4_K and Q5_K: uint8 [n, 8] twice -> [n, 12]."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], axis=1)


def _packed(levels: np.ndarray, width: int, bits: int) -> np.ndarray:
    """The inverse of `kvasir.quant.blocks.fields`: uint8 [n, weights] -> [n, weights * bits / 8]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = levels.astype(np.uint8).reshape(len(levels), -1, 8 // bits, width) << shifts
    return np.bitwise_or.reduce(parts, axis=2).reshape(len(levels), -1)


def _nearest(values: np.ndarray) -> np.ndarray:
    """Indices of the IQ4 levels nearest to values."""
    return np.searchsorted((IQ4_LEVELS[1:] + IQ4_LEVELS[:-1]) / 2, values).astype(np.uint8)


def _signed_largest(values: np.ndarray) -> np.ndarray:
    """The value of largest magnitude along the last axis, with its sign."""
    return np.take_along_axis(values, np.abs(values).argmax(-1)[..., None], -1)[..., 0]


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


_ENCODERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "Q1_0": _q1_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
