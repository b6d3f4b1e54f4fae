"""Matrices with scales beside them: compressed-tensors, FP8 of DeepSeek, FBGEMM and others, and ModelOpt.

    weight_packed I32            integers along the rows, with an offset; weight_scale, weight_zero_point
    weight I8                    integers; weight_scale
    weight F8_E4M3               numbers; weight_scale of the matrix, of rows or of blocks, or U8: of groups of 32
    weight_packed U8, weight U8  pairs of FP4; weight_scale U8: of groups of 32, F8_E4M3: of groups of 16

A value is a code times its scale; with a zero point, the code minus the zero point times the scale. Sources: the
packages `compressed-tensors` and `modelopt`; DeepSeek-V3's `fp8_cast_bf16.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import ml_dtypes
import numpy as np

from kvasir.quant.inputs import Inputs
from kvasir.weights.published.codes import (
    E2M1,
    OWN_GROUP,
    exact_halves,
    group_order,
    nibbles,
    powers,
    spread,
    to_mxfp4_blocks,
    to_own_blocks,
    to_q4_0_blocks,
    to_q8_0_blocks,
    unpacked,
)
from kvasir.weights.published.rows import RowScheme
from kvasir.weights.published.view import Decoded, Stored, stems
from kvasir.weights.source import WeightSource

# The scales of activations, which `_inputs` reads where kernels follow them, and of the KV cache.
DROPPED = (
    r".*\.(input_scale(_ub)?|output_scale|input_global_scale|input_zero_point|activation_scale(_ub)?"
    r"|[kqv]_(scale|zero_point))"
)
_GROUP = 32  # of MX formats, and of GGML's blocks
_FP8_GROUP = 128  # of the packed format FP8


def read(source: WeightSource, block: tuple[int, int], rows: RowScheme | None = None) -> Iterator[Decoded]:
    """All quantized matrices of a checkpoint. block: rows and columns that share an FP8 scale, where scales are of
    blocks. rows: how the checkpoint rounds input rows, if kernels follow that."""
    for stored in stems(source, "weight_packed"):
        yield (
            _integers(stored) if stored.info("weight_packed").dtype in ("I32", "U32") else _fp4(stored, "weight_packed")
        )
    for stored in stems(source, "weight"):
        dtype = stored.info("weight").dtype
        if "weight_scale" not in stored and "weight_scale_inv" not in stored:
            continue
        if dtype == "U8":
            yield _fp4(stored, "weight")
        elif dtype == "I8":
            yield _bytes(stored, rows)
        elif dtype == "F8_E4M3":
            yield _fp8(stored, block, rows)
        else:
            stored.refuse(f"weight is stored as {dtype} with a scale", "expected I8, U8 or F8_E4M3")


def _inputs(stored: Stored, rounding: str, scheme: RowScheme | None) -> Inputs | None:
    """How rows are rounded; None if the scheme is for another type, or has no scale for this matrix, none that is
    positive, or a zero point."""
    if scheme is None or scheme.rounding != rounding:
        return None
    if not scheme.is_static:
        return Inputs(rounding, 0.0, scheme.group)
    if "input_scale" not in stored:
        return None
    if "input_zero_point" in stored and stored.array("input_zero_point").astype(np.float32).any():
        return None
    scales = stored.array("input_scale").astype(np.float32).reshape(-1)
    if scales.size != 1 or not 1e-12 < scales[0] < 1e12:  # files that were not calibrated have arbitrary numbers
        return None
    return Inputs(rounding, float(scales[0]))


def _parts(stored: Stored, *kinds: str) -> tuple[str, ...]:
    return tuple(f"{stored.stem}.{kind}" for kind in kinds if kind in stored)


def _matrix(stored: Stored, kind: str) -> tuple[int, int]:
    shape = stored.info(kind).shape
    if len(shape) != 2 or not all(shape):
        stored.refuse(f"{kind} has shape {list(shape)}", "expected a matrix")
    return shape[0], shape[1]


# --- integers ---------------------------------------------------------------------------------------


def _integers(stored: Stored) -> Decoded:
    rows, words = _matrix(stored, "weight_packed")
    shape = stored.array("weight_shape", (2,)).astype(np.int64).tolist()
    cols = shape[1]
    if shape[0] != rows or cols <= 0 or words * 32 % cols or words * 32 // cols not in (2, 4, 8):
        stored.refuse(
            f"weight_packed has shape {[rows, words]}, for a matrix {shape}", "expected 2, 4 or 8 bits a value"
        )
    bits, groups = words * 32 // cols, _matrix(stored, "weight_scale")[1]
    if stored.info("weight_scale").shape[0] != rows or cols % groups:
        stored.refuse(f"weight_scale has shape {list(stored.info('weight_scale').shape)}", f"expected groups of {cols}")
    parts = _parts(stored, "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
    name, group = f"{stored.stem}.weight", cols // groups
    symmetric, shape, index = "weight_zero_point" not in stored, (rows, cols), _index(stored, cols, groups)
    order = group_order(index, groups)

    def values() -> np.ndarray:
        scales = stored.array("weight_scale").astype(np.float32)
        return (_differences(stored, bits, index) * scales[:, index]).astype(ml_dtypes.bfloat16)

    if order is None or group % _GROUP:
        return Decoded(name, shape, "BF16", parts, values)
    is_ordered = not np.array_equal(order, np.arange(cols))

    def packed(kind: str, blocks: Callable[[np.ndarray], np.ndarray], numbers: Callable[[], np.ndarray]) -> Decoded:
        """blocks: of numbers that have the columns of a group side by side."""
        if not is_ordered:
            return Decoded(name, shape, kind, parts, lambda: blocks(numbers()))
        return Decoded(
            name, shape, kind, parts, lambda: blocks(np.ascontiguousarray(numbers()[:, order])), values,
            Inputs(order=order),
        )  # fmt: skip

    def codes() -> np.ndarray:
        return unpacked(stored.array("weight_packed"), bits)

    is_half = exact_halves(stored.array("weight_scale")) is not None
    if symmetric and bits == 4 and is_half:
        return packed("Q4_0", partial(_as_q4_0, stored, group), codes)
    if group % OWN_GROUP == 0 and ((symmetric and (bits < 8 or not is_half)) or (not symmetric and is_half)):
        kind = f"INT{4 if bits < 8 else 8}{'' if symmetric else '_ZP'}"
        return packed(kind, partial(_as_own, stored, kind, bits, group), codes)
    if is_half and (symmetric or bits < 8):
        return packed("Q8_0", partial(_as_q8_0, stored, group), partial(_differences, stored, bits, index))
    return Decoded(name, shape, "BF16", parts, values)


def _index(stored: Stored, cols: int, groups: int) -> np.ndarray:
    """The group of each column, int64 [cols]. With -1 in `weight_g_idx`, they are in order."""
    if "weight_g_idx" in stored:
        index = stored.array("weight_g_idx", (cols,)).astype(np.int64)
        if (index != -1).all():
            if ((index < 0) | (index >= groups)).any():
                stored.refuse("weight_g_idx names groups that have no scale", f"there are {groups}")
            return index
    return np.arange(cols) // (cols // groups)


def _as_own(stored: Stored, kind: str, bits: int, group: int, codes: np.ndarray) -> np.ndarray:
    scales = stored.array("weight_scale").astype(np.float32).repeat(group // OWN_GROUP, 1)
    if kind.endswith("_ZP"):
        return to_own_blocks(kind, codes, d=scales, zero=_zeros(stored, bits).repeat(group // OWN_GROUP, 1))
    lift = (8 if kind == "INT4" else 128) - (1 << bits - 1)  # to the zero of the packed format
    return to_own_blocks(kind, codes + np.uint8(lift), d=scales)


def _as_q4_0(stored: Stored, group: int, codes: np.ndarray) -> np.ndarray:
    scales = stored.array("weight_scale").astype(np.float16).repeat(group // _GROUP, 1)
    return to_q4_0_blocks(codes, scales)


def _as_q8_0(stored: Stored, group: int, differences: np.ndarray) -> np.ndarray:
    scales = stored.array("weight_scale").astype(np.float16).repeat(group // _GROUP, 1)
    return to_q8_0_blocks(differences, scales)


def _differences(stored: Stored, bits: int, groups: np.ndarray) -> np.ndarray:
    """Codes minus zero points, int16 [rows, cols]. groups: of each column."""
    offset = 1 << bits - 1
    codes = unpacked(stored.array("weight_packed"), bits).astype(np.int16)
    if "weight_zero_point" not in stored:
        return codes - offset
    return codes - _zeros(stored, bits)[:, groups]


def _zeros(stored: Stored, bits: int) -> np.ndarray:
    """int16 [rows, groups]"""
    rows, groups = stored.info("weight_scale").shape
    packed = stored.array("weight_zero_point", (-(-rows * bits // 32), groups))
    return unpacked(np.ascontiguousarray(packed.T), bits).T[:rows].astype(np.int16)


def _bytes(stored: Stored, scheme: RowScheme | None) -> Decoded:
    rows, cols = _matrix(stored, "weight")
    parts = _parts(stored, "weight", "weight_scale", "weight_zero_point")

    def compute() -> np.ndarray:
        values = stored.array("weight").astype(np.float32)
        scales = _of_groups(stored, stored.array("weight_scale"), rows, cols)
        if "weight_zero_point" in stored:
            values -= _of_groups(stored, stored.array("weight_zero_point"), rows, cols)
        return (values * scales).astype(ml_dtypes.bfloat16)

    def blocks() -> np.ndarray:
        scales = _of_groups(stored, stored.array("weight_scale"), rows, cols)
        return to_own_blocks("INT8", stored.array("weight").view(np.uint8) ^ 128, d=scales[:, ::OWN_GROUP])

    name, size = f"{stored.stem}.weight", _group_size(stored.info("weight_scale").shape, rows, cols)
    if "weight_zero_point" not in stored and cols % OWN_GROUP == 0 and size % OWN_GROUP == 0:
        return Decoded(name, (rows, cols), "INT8", parts, blocks, compute, _inputs(stored, "int8", scheme))
    return Decoded(name, (rows, cols), "BF16", parts, compute)


def _group_size(scales: tuple[int, ...], rows: int, cols: int) -> int:
    """Columns that share a scale, with `_of_groups`."""
    count = math.prod(scales)
    return cols if count <= 1 else cols // max(1, count // rows)


def _of_groups(stored: Stored, scales: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Scales of the matrix, of rows or of groups of columns, float32, broadcastable to [rows, cols]."""
    values = scales.astype(np.float32)
    if values.size == 1:
        return values.reshape(1, 1)
    if values.shape[:1] != (rows,) or values.ndim > 2 or cols % max(1, values.size // rows):
        stored.refuse(f"its scales have shape {list(scales.shape)}", f"expected one, {rows}, or groups of {cols}")
    return values.reshape(rows, -1).repeat(cols // (values.size // rows), 1)


# --- floats -----------------------------------------------------------------------------------------


def _fp8(stored: Stored, block: tuple[int, int], scheme: RowScheme | None) -> Decoded:
    rows, cols = _matrix(stored, "weight")
    kind = "weight_scale_inv" if "weight_scale_inv" in stored else "weight_scale"
    info = stored.info(kind)
    blocks = -(-rows // block[0]), -(-cols // block[1])

    def compute() -> np.ndarray:
        values, scales = stored.array("weight").astype(np.float32), stored.array(kind)
        if info.dtype == "U8":
            if scales.shape != (rows, cols // _GROUP) or cols % _GROUP:
                stored.refuse(f"{kind} has shape {list(scales.shape)}", f"expected {[rows, cols // _GROUP]}")
            each = powers(scales).repeat(_GROUP, 1)
        elif scales.shape == blocks and scales.size > 1 and scales.shape != (rows, 1):
            each = spread(scales.astype(np.float32), (rows, cols), block)
        else:
            each = _of_groups(stored, scales, rows, cols)
        return (values * each).astype(ml_dtypes.bfloat16)

    def blocks_of_fp8() -> np.ndarray:
        codes, scales = stored.array("weight").view(np.uint8), stored.array(kind).astype(np.float32)
        if (codes & 127 == 127).any():
            stored.refuse("weight has values that are not numbers", "is the file damaged?")
        if is_blocks:
            each = scales.repeat(block[0], 0)[:rows].repeat(block[1] // _FP8_GROUP, 1)[:, : cols // _FP8_GROUP]
        else:
            each = _of_groups(stored, scales, rows, cols)[:, ::_FP8_GROUP]
        return to_own_blocks("FP8", codes, d=each)

    name, parts = f"{stored.stem}.weight", _parts(stored, "weight", kind)
    is_blocks = tuple(info.shape) == blocks and math.prod(info.shape) > 1 and tuple(info.shape) != (rows, 1)
    size = block[1] if is_blocks else _group_size(info.shape, rows, cols)
    if info.dtype != "U8" and cols % _FP8_GROUP == 0 and size % _FP8_GROUP == 0:
        return Decoded(name, (rows, cols), "FP8", parts, blocks_of_fp8, compute, _inputs(stored, "fp8", scheme))
    return Decoded(name, (rows, cols), "BF16", parts, compute)


def _fp4(stored: Stored, kind: str) -> Decoded:
    rows, half = _matrix(stored, kind)
    if stored.info(kind).dtype != "U8":
        stored.refuse(f"{kind} is stored as {stored.info(kind).dtype}", "expected I32 (integers) or U8 (FP4)")
    cols, scale = 2 * half, stored.info("weight_scale")
    group = _GROUP if scale.dtype == "U8" else 16
    if tuple(scale.shape) != (rows, cols // group) or cols % group:
        stored.refuse(f"weight_scale has shape {list(scale.shape)}", f"expected {[rows, cols // group]}")
    name, parts = f"{stored.stem}.weight", _parts(stored, kind, "weight_scale", "weight_global_scale", "weight_scale_2")
    if group == _GROUP:

        def blocks() -> np.ndarray:
            return to_mxfp4_blocks(nibbles(stored.array(kind)), stored.array("weight_scale"))

        return Decoded(name, (rows, cols), "MXFP4", parts, blocks)
    if scale.dtype != "F8_E4M3":
        stored.refuse(f"weight_scale is stored as {scale.dtype}", "expected U8 or F8_E4M3")

    def packed() -> np.ndarray:
        scales = stored.array("weight_scale").view(np.uint8)
        if (scales & 127 == 127).any():
            stored.refuse("weight_scale has values that are not numbers", "is the file damaged?")
        whole = np.ones(1, np.float32)
        if "weight_global_scale" in stored:
            whole = whole / stored.array("weight_global_scale").astype(np.float32).reshape(-1)[:1]
        elif "weight_scale_2" in stored:
            whole = stored.array("weight_scale_2").astype(np.float32).reshape(-1)[:1]
        return to_own_blocks("NVFP4_SCALED", nibbles(stored.array(kind)), d=whole, scales=scales.reshape(rows, -1, 4))

    def compute() -> np.ndarray:
        scales = stored.array("weight_scale").astype(np.float32)
        if "weight_global_scale" in stored:  # compressed-tensors stores its inverse
            scales = scales / stored.array("weight_global_scale").astype(np.float32).reshape(-1)[:1]
        elif "weight_scale_2" in stored:
            scales = scales * stored.array("weight_scale_2").astype(np.float32).reshape(-1)[:1]
        return (E2M1[nibbles(stored.array(kind))] * scales.repeat(group, 1)).astype(ml_dtypes.bfloat16)

    if cols % OWN_GROUP == 0:
        return Decoded(name, (rows, cols), "NVFP4_SCALED", parts, packed, compute)
    return Decoded(name, (rows, cols), "BF16", parts, compute)
