"""Bindings of csrc/abi_linear.cpp: packing matrices for the kernels, and direct products with them.

Steps do not use this module (programs call the kernels themselves); it packs matrices at load, and serves tests.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Protocol

import numpy as np

from kvasir.ops import native

# In the order of csrc/matrix.h.
FORMATS = (
    *("F32", "F16", "BF16", "FP8", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
    *("INT4", "INT8", "INT4_ZP", "INT8_ZP", "AFFINE4", "AFFINE8", "NF4", "NVFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TERNARY"),
)
ACTIVATIONS = ("float32", "bfloat16", "q8_32", "q8_256", "q8_row")
PANEL = 16
LINE = 64  # alignment of the kernels' arrays, in bytes


class MatrixStruct(ctypes.Structure):
    """struct Matrix of csrc/matrix.h."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("segments", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )


class Packed(Protocol):
    """The attributes of a matrix that products read; see packed.PackedMatrix."""

    rows: int
    cols: int
    struct: MatrixStruct
    activated_bytes: int


_POINTER, _INT32, _INT64, _MATRIX = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.POINTER(MatrixStruct)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "kvasir_format_of": (_INT32, [_INT32]),
    "kvasir_matrix_bytes": (_INT64, [_INT32, _INT64, _INT64, _INT32]),
    "kvasir_activated_bytes": (_INT64, [_INT32, _INT32, _INT64, _INT32]),
    "kvasir_pack": (_INT32, [_MATRIX, _INT32, _POINTER, _INT64, _INT64, _INT64]),
    "kvasir_prepare": (None, [_MATRIX, _POINTER, _POINTER, _INT64, _INT64]),
    "kvasir_linear": (
        None,
        [_MATRIX, _POINTER, _INT64, _INT64, _INT64, _POINTER, _INT64, _POINTER, _POINTER, _INT64],
    ),
    "kvasir_lookup": (None, [_MATRIX, _POINTER, _INT64, _POINTER, _INT64]),
    "kvasir_change_squares": (
        _INT32,
        [_MATRIX, ctypes.c_float, _POINTER, _POINTER, _INT64, _INT32, _INT64, _INT64, _POINTER, _POINTER],
    ),
}


@cache
def _call(name: str) -> Any:
    result, arguments = _SIGNATURES[name]
    return native.declare(name, result, *arguments)


def format_of(ggml_type: int) -> str | None:
    """The packed format that holds this GGML type's values bit for bit, or None."""
    found = _call("kvasir_format_of")(ggml_type)
    return FORMATS[found] if found >= 0 else None


def matrix_bytes(struct: MatrixStruct) -> int:
    """Bytes of the matrix's data. Raises ValueError for an unsupported matrix."""
    nbytes = _call("kvasir_matrix_bytes")(struct.format, struct.rows, struct.cols, struct.segments)
    if nbytes < 0:
        raise ValueError(f"no matrix is [{struct.rows}, {struct.cols}] in {struct.segments} segments")
    return nbytes


def activated_bytes(struct: MatrixStruct) -> int:
    """Bytes of one row converted to activations, a multiple of LINE."""
    return _call("kvasir_activated_bytes")(struct.format, struct.activation, struct.cols, struct.segments)


def can_pack(struct: MatrixStruct, ggml_type: int) -> bool:
    """Whether `pack` accepts rows of this type."""
    return _call("kvasir_pack")(struct, ggml_type, None, 0, 0, 0) == 0


def pack(struct: MatrixStruct, ggml_type: int, rows: np.ndarray, first_row: int) -> None:
    """Packs raw rows, uint8 [n, row bytes], each dense, as the matrix's rows from `first_row` on.

    first_row must be a multiple of PANEL; so must n, unless the rows end the matrix. struct.data must have room for
    matrix_bytes. Raises ValueError for other ranges.
    """
    assert rows.dtype == np.uint8 and rows.strides[1] == 1
    if _call("kvasir_pack")(struct, ggml_type, rows.ctypes.data, rows.strides[0], first_row, len(rows)):
        raise ValueError(f"rows {first_row} to {first_row + len(rows)} cannot be packed")


def prepare(matrix: Packed, x: Any) -> np.ndarray:
    """Converts float32 rows [T, cols] (array or CPU tensor) to the matrix's activations, uint8 [T, activated_bytes]."""
    rows = len(x)
    out = aligned(rows * matrix.activated_bytes).reshape(rows, matrix.activated_bytes)
    x_ptr = native.address(x, "x", (rows, matrix.cols))
    _call("kvasir_prepare")(matrix.struct, out.ctypes.data, x_ptr, matrix.cols, rows)
    return out


def linear(
    matrix: Packed,
    activated: np.ndarray,
    out: Any,
    bias: Any = None,
    residual: Any = None,
    panels: tuple[int, int] | None = None,
) -> None:
    """out[:, 16 * first : 16 * last] = residual + (bias + rows x matrix). panels: (first, last), all by default.

    activated: from `prepare`. out, residual: float32 [T, matrix.rows]; residual may be out. bias: float32
    [matrix.rows]. Raises ValueError for arguments that the kernel could not read or write safely.
    """
    rows = len(activated)
    all_panels = -(-matrix.rows // PANEL)
    first, last = panels or (0, all_panels)
    if not 0 <= first <= last <= all_panels:
        raise ValueError(f"panels must lie in 0 to {all_panels}, they are {first} to {last}")
    shape = (rows, matrix.rows)
    activated_ptr = native.address(activated, "activated", (rows, matrix.activated_bytes), "uint8")
    if activated_ptr % LINE:
        raise ValueError(f"activated must start at a multiple of {LINE} bytes")
    out_ptr = native.address(out, "out", shape, writable=True)
    bias_ptr = None if bias is None else native.address(bias, "bias", shape[1:])
    residual_ptr = None if residual is None else native.address(residual, "residual", shape)
    _call("kvasir_linear")(
        *(matrix.struct, activated_ptr, rows, first, last, out_ptr, matrix.rows),
        *(bias_ptr, residual_ptr, matrix.rows),
    )


def product(matrix: Packed, x: Any, bias: Any = None, residual: Any = None) -> np.ndarray:
    """residual + (bias + x W^T), float32 [T, rows], in one call. x: float32 [T, cols]."""
    out = np.empty((len(x), matrix.rows), np.float32)
    linear(matrix, prepare(matrix, x), out, bias, residual)
    return out


def lookup(matrix: Packed, ids: Any) -> np.ndarray:
    """Rows of the matrix as float32 [n, cols]. ids: int64 [n]. Raises ValueError for an id outside the matrix."""
    ids = np.ascontiguousarray(ids, np.int64)
    if ids.ndim != 1 or (ids.size and not 0 <= ids.min() <= ids.max() < matrix.rows):
        raise ValueError(f"ids must be a row of numbers in 0 to {matrix.rows - 1}")
    out = np.empty((len(ids), matrix.cols), np.float32)
    _call("kvasir_lookup")(matrix.struct, out.ctypes.data, matrix.cols, ids.ctypes.data, len(ids))
    return out


def change_squares(matrix: Any, a: np.ndarray, b: np.ndarray, segments: int) -> np.ndarray:
    """The sums of squares of the rows of W + b a, float64 [rows, segments], of equal runs of columns. matrix: W, with
    its `scale`, a packed.PackedMatrix. a: float32 [rank, cols], b: float32 [rows, rank], contiguous. Raises ValueError
    for shapes that do not fit."""
    rank = len(a)
    if a.shape != (rank, matrix.cols) or b.shape != (matrix.rows, rank) or matrix.cols % segments:
        raise ValueError(f"a {a.shape} and b {b.shape} in {segments} segments do not fit to {matrix}")
    if matrix.inputs is not None and matrix.inputs.order is not None:
        a = np.ascontiguousarray(a[:, matrix.inputs.order])
    out, room = np.empty((matrix.rows, segments)), np.empty(matrix.cols, np.float32)
    a_ptr, b_ptr = native.address(a, "a", a.shape), native.address(b, "b", b.shape)
    _call("kvasir_change_squares")(
        *(matrix.struct, matrix.scale, a_ptr, b_ptr, rank, segments, 0, matrix.rows, out.ctypes.data, room.ctypes.data)
    )
    return out


def aligned(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] whose address is a multiple of LINE."""
    memory = np.empty(nbytes + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + nbytes]
