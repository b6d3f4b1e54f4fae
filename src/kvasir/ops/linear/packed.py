"""Weight matrices in the layouts of the native kernels (csrc/matrix.h), packed once at load.

A matrix keeps the format of its file if there is a layout for it, so that its values are the file's bit for bit.

    in the file                       packed
    F32, F16, BF16                    the same
    Q4_0 ... Q6_K, IQ4_*, MXFP4       the same
    TQ1_0, TQ2_0                      TERNARY
    BITNET (ternary safetensors)      TERNARY, with rows rounded by one scale, and a `scale` of the product
    FP8, INT4 ... NF4, NVFP4_SCALED   the same (published formats of safetensors)
    other quantized types             Q8_0, and with a `note`
    F64, integers                     F32, and with a `note`
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from typing import NamedTuple

import numpy as np

from kvasir.errors import ConfigError
from kvasir.ops.linear import native
from kvasir.ops.linear.native import ACTIVATIONS, FORMATS, PANEL, MatrixStruct
from kvasir.quant.gguf_types import GGMLType, dequantize
from kvasir.quant.inputs import Inputs

MAX_SEGMENTS = 8
_HUGE_PAGE = 2 << 20
CHUNK = 1 << 20  # weights per packing task
_RULED = 16  # csrc/input_rule.h
_OUTLIERS = 32  # csrc/outliers.h
_FLOATS = {"F32": 1, "F16": 1, "BF16": 2, "FP8": 128}  # with their group sizes


class PackedMatrix:
    """A matrix [rows, cols] and its memory. Immutable after `pack_rows`, but for where its memory is.

    format: one of FORMATS. segments: how many segments the sum over cols has. activation: one of ACTIVATIONS, the
    format that input rows are converted to, activated_bytes each. struct: the structure that kernels read, at
    `address`; both stay valid as long as this object. note: a message for users if the file's format could not be kept.
    inputs: how the checkpoint wants the input rows, None if as the format does it. scale: a
    factor that the layer applies to the product.
    """

    scale = 1.0
    _read_copy: Callable[[], np.ndarray] | None = None

    def __init__(
        self,
        format: str,
        rows: int,
        cols: int,
        segments: int,
        activation: str = "auto",
        note: str = "",
        inputs: Inputs | None = None,
        memory: np.ndarray | None = None,
    ):
        """Raises ValueError for an unsupported matrix. memory: as in `pack_rows`."""
        _check_inputs(format, cols, inputs)
        self.format = format
        self.rows, self.cols, self.segments = rows, cols, segments
        self.activation = _activation(format, "float32" if inputs and inputs.rounding == "fp8" else activation)
        self.note = note
        self.inputs = inputs
        self.struct = MatrixStruct(
            FORMATS.index(format), ACTIVATIONS.index(self.activation), segments, 0, rows, cols, None
        )
        if inputs and inputs.rounding == "outliers":
            self.struct.activation += _OUTLIERS
        panels = self.nbytes = native.matrix_bytes(self.struct)
        self.activated_bytes = native.activated_bytes(self.struct)
        record = inputs.record() if inputs else b""
        self.nbytes += len(record)
        self.memory = allocate(self.nbytes) if memory is None else memory[: self.nbytes]
        assert self.memory.nbytes == self.nbytes, "too little memory"
        self.struct.data = self.memory.ctypes.data
        if inputs:
            self.memory[panels:] = record
            self.struct.activation += _RULED

    def move(self, memory: np.ndarray | None, read: Callable[[], np.ndarray] | None = None) -> None:
        """Gives the matrix other memory, where its bytes are or will be; None for none yet. read: reads a copy of them,
        for a matrix whose bytes are in `memory` only while a step needs them."""
        self.memory = np.empty(0, np.uint8) if memory is None else memory[: self.nbytes]
        self.memory.flags.writeable = False
        self.struct.data = None if memory is None else self.memory.ctypes.data
        self._read_copy = read

    def present(self) -> PackedMatrix:
        """This matrix, or a copy of it if its bytes are in its memory only at times."""
        if self._read_copy is None:
            return self
        found = copy(self)
        found.struct = MatrixStruct.from_buffer_copy(self.struct)
        found.move(self._read_copy())
        return found

    @property
    def address(self) -> int:
        """The address of `struct`."""
        return ctypes.addressof(self.struct)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.cols)

    @property
    def key(self) -> tuple:
        """Equal for matrices that one kernel call can process."""
        return self.format, self.activation, self.rows, self.cols, self.segments, self.inputs and self.inputs.key

    @property
    def dtype(self) -> str:
        """The dtype of the surrounding model: the type of input rows for float weights."""
        return "float32" if self.activation == "float32" else "bfloat16"

    def first(self, rows: int) -> PackedMatrix:
        """The matrix of the first rows, whole panels or all of them, in the memory of this one. For a matrix whose
        inputs have no rule of their own."""
        assert self.inputs is None, "the rule of the inputs follows the whole matrix"
        assert rows == self.rows or rows % PANEL == 0, f"{rows} rows are not whole panels"
        found = copy(self)
        found.struct = MatrixStruct.from_buffer_copy(self.struct)
        found.rows = found.struct.rows = rows
        found.nbytes = native.matrix_bytes(found.struct)
        found.memory = self.memory[: found.nbytes]
        return found

    def runs(self, count: int) -> list[MatrixStruct]:
        """The matrices of `count` equal runs of rows, each of whole panels, in the memory of this one."""
        each = self.rows // count
        assert self.inputs is None, "the rule of the inputs follows the whole matrix"
        assert each * count == self.rows and each % PANEL == 0, f"{count} runs of panels of {self.rows} rows"
        found = []
        for first in range(0, self.rows, each):
            s = self.struct
            part = MatrixStruct(s.format, s.activation, s.segments, 0, each, s.cols, None)
            part.data = s.data + first // each * native.matrix_bytes(part)
            found.append(part)
        return found

    def row(self, index: int) -> np.ndarray:
        """Row `index` as float32 [cols]."""
        return native.lookup(self, [index])[0]

    def __repr__(self) -> str:
        return f"PackedMatrix({self.format} [{self.rows}, {self.cols}], {self.segments} segments, {self.activation})"


def pack_rows(
    source_type: str,
    parts: np.ndarray | Sequence[np.ndarray],
    rows: int,
    cols: int,
    segments: int,
    *,
    to: str | None = None,
    activation: str = "auto",
    threads: int = 2,
    inputs: Inputs | None = None,
    memory: np.ndarray | None = None,
) -> PackedMatrix:
    """Packs rows in a file's format: uint8 [n, row bytes] of GGML type `source_type`, from one matrix or several that
    are joined, with `rows` rows of `cols` weights in total. The inputs are only read, so they may be views of a mapped
    file.

    to: a format other than the file's (floats convert to any float format, Q8_0 or Q4_0, with rounding where
    necessary). activation: "float32" keeps the input rows of bfloat16 weights as they are. inputs: how the checkpoint
    wants the input rows; "int8" and "outliers" are for INT8, "fp8" for FP8. memory: uint8, at least `packed_bytes`,
    from a cache line on, to pack into instead of memory of its own. Raises ConfigError if the conversion is not
    supported, ValueError for inconsistent sizes.
    """
    kind = _known(source_type)
    parts = [parts] if isinstance(parts, np.ndarray) else list(parts)
    _check(kind, parts, rows, cols)
    format, note = _choose(kind, to)
    rounding = "q8_row" if kind == GGMLType.BITNET and format == "TERNARY" else activation
    packed = PackedMatrix(format, rows, cols, segments, rounding, note, inputs, memory)
    # Types that the kernels cannot read are converted through float32.
    if kind == GGMLType.BITNET:
        kind, parts, packed.scale = GGMLType.TQ2_0, *_bitnet_parts(parts)
    is_read = native.can_pack(packed.struct, kind)
    if not is_read and native.format_of(kind) == format:
        raise ValueError(f"{cols} columns of {format} cannot be cut into {segments} segments of whole groups")
    if not native.can_pack(packed.struct, kind if is_read else GGMLType.F32):
        raise ConfigError(f"{kind.name} cannot be converted to {format}", "choose F32, BF16, Q8_0 or Q4_0")

    def pack(piece: tuple[int, int]) -> None:
        first, last = piece
        raw = _take(parts, first, last)
        if is_read:
            native.pack(packed.struct, kind, raw, first)
        else:
            values = dequantize(np.ascontiguousarray(raw), kind, (last - first, cols))
            native.pack(packed.struct, GGMLType.F32, values.view(np.uint8), first)

    pieces = list(_pieces(rows, cols))
    if len(pieces) == 1:
        pack(pieces[0])
    else:
        for _ in _threads(threads).map(pack, pieces):
            pass
    packed.memory.flags.writeable = False
    return packed


def take_columns(
    source_type: str, rows: np.ndarray, cols: int, taken: tuple[int, int], to: str | None
) -> tuple[str, np.ndarray, str | None]:
    """Columns [first, last) of whole rows, uint8 [n, row bytes], with their type and `to`. `pack_rows` packs them to
    the same values as these columns of the whole rows. Columns that are not whole blocks of the file are converted to
    float32."""
    kind, (first, last) = _known(source_type), taken
    if taken == (0, cols):
        return source_type, rows, to
    if first % kind.block_size == 0 and last % kind.block_size == 0:
        return source_type, rows[:, kind.row_bytes(first) : kind.row_bytes(last)], to
    values = dequantize(np.ascontiguousarray(rows), kind, (len(rows), cols))
    return "F32", np.ascontiguousarray(values[:, first:last]).view(np.uint8), _choose(kind, to)[0]


def packed_bytes(source_type: str, rows: int, cols: int, segments: int, to: str | None = None) -> int:
    """Bytes of the matrix that `pack_rows` would create. Raises ConfigError or ValueError if it would fail."""
    format, _ = _choose(_known(source_type), to)
    return native.matrix_bytes(MatrixStruct(FORMATS.index(format), 0, segments, 0, rows, cols, None))


def num_segments(cols: int, format: str) -> int:
    """S, the number of segments of a reducing role's sum over `cols` inputs: a power of two, at most 8, such that each
    segment has whole groups of the format (32 for floats), and blocks of 64 or 256 inputs pad it by at most an eighth.
    A float matrix that cannot be split so has segments of at least 16 inputs.

    format: a packed format, or a GGML type, which stands for the format that `pack_rows` converts it to.
    """
    chosen = format if format in FORMATS else _choose(_known(format), None)[0]
    group = _group(chosen)
    block = 1 if group < 32 else max(group, 64)
    for least, multiple in ((32, 32), (16, 1)) if group < 32 else ((group, group),):
        for segments in (MAX_SEGMENTS, 4, 2):
            size = cols // segments
            fits = 8 * (-size % block) <= size
            if cols % segments == 0 and size >= least and size % multiple == 0 and fits:
                return segments
    return 1


class PackingError(NamedTuple):
    """The maximum and mean absolute difference from the original weights, relative to their root mean square."""

    max: float
    mean: float


def error_of(packed: PackedMatrix, reference: np.ndarray) -> PackingError:
    """The packing error against float32 `reference` [rows, cols]; for a matrix of zeros, the RMS counts as 1."""
    if reference.shape != packed.shape:
        raise ValueError(f"reference must be of shape {packed.shape}, it is {reference.shape}")
    most = total = square = 0.0
    for first, last in _pieces(*packed.shape):
        expected = reference[first:last].astype(np.float64)
        difference = np.abs(native.lookup(packed, np.arange(first, last)) - expected)
        most = max(most, float(difference.max()))
        total += float(difference.sum())
        square += float(np.square(expected).sum())
    count = packed.rows * packed.cols
    rms = (square / count) ** 0.5 or 1.0
    return PackingError(most / rms, total / count / rms)


def _known(name: str) -> GGMLType:
    if name not in GGMLType.__members__:
        raise ConfigError(f"unknown weight format {name!r}", f"choose one of {', '.join(GGMLType.__members__)}")
    return GGMLType[name]


def _choose(kind: GGMLType, to: str | None) -> tuple[str, str]:
    """(packed format, note)."""
    if to in FORMATS:
        return to, ""
    kind = kind if to is None else _known(to)
    if kind == GGMLType.BITNET:
        return "TERNARY", ""
    if found := native.format_of(kind):
        return found, ""
    format = "F32" if kind.is_plain else "Q8_0"
    return format, f"{kind.name} has no kernels of its own: its weights are rounded to {format}"


def _group(format: str) -> int:
    """group_of in csrc/matrix.h"""
    if format in _FLOATS:
        return _FLOATS[format]
    index = FORMATS.index(format)
    return 32 if index < FORMATS.index("INT4") else 64 if index < FORMATS.index("Q2_K") else 256


def _activation(format: str, asked: str) -> str:
    if asked == "q8_row" and format == "TERNARY":
        return asked
    if asked not in ("auto", "float32"):
        raise ConfigError(f"activation is {asked!r}", "choose auto or float32")
    if format in _FLOATS:
        return "bfloat16" if format in ("BF16", "FP8") and asked == "auto" else "float32"
    return "q8_256" if _group(format) == 256 else "q8_32"


def _check_inputs(format: str, cols: int, inputs: Inputs | None) -> None:
    """Raises ValueError for a rule that the kernels do not have."""
    if inputs is None:
        return
    if inputs.rounding and inputs.rounding not in {"INT8": ("int8", "outliers"), "FP8": ("fp8",)}.get(format, ()):
        raise ValueError(f"inputs of {format} are not rounded to {inputs.rounding}")
    if inputs.group % PANEL or (inputs.group and inputs.rounding != "fp8") or not 0 <= inputs.scale < np.inf:
        raise ValueError(f"inputs cannot be scaled by {inputs.scale} in groups of {inputs.group}")
    if inputs.order is not None and inputs.rounding == "outliers":
        raise ValueError("inputs with outliers cannot be ordered")
    if inputs.order is not None and (
        format in _FLOATS or not np.array_equal(np.sort(inputs.order), np.arange(cols, dtype=np.int32))
    ):
        raise ValueError(f"the order of the inputs of {format} is not a permutation of {cols} columns")


def _check(kind: GGMLType, parts: list[np.ndarray], rows: int, cols: int) -> None:
    if cols % kind.block_size:
        raise ValueError(f"rows of {cols} are not whole blocks of {kind.name}")
    row_bytes = kind.row_bytes(cols)
    for part in parts:
        if part.dtype != np.uint8 or part.ndim != 2 or part.shape[1] != row_bytes:
            raise ValueError(f"rows of {kind.name} are uint8 [n, {row_bytes}], not {part.dtype} {list(part.shape)}")
    if sum(map(len, parts)) != rows:
        raise ValueError(f"expected {rows} rows, got {sum(map(len, parts))}")


def _bitnet_parts(parts: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
    """Rows of BITNET as rows of TQ2_0, and the factor of their values: 1 if float16 has all scales. Raises ValueError
    if it does not, and they differ."""
    blocks = [np.ascontiguousarray(part).view(GGMLType.BITNET.layout) for part in parts]
    scales = np.concatenate([part["d"].reshape(-1) for part in blocks])
    with np.errstate(over="ignore"):
        exact = np.array_equal(scales.astype(np.float16).astype(np.float32), scales)
    if not exact and (scales != scales[0]).any():
        raise ValueError("ternary blocks have different scales that are no float16 numbers")
    found = []
    for part in blocks:
        made = np.empty(part.shape, GGMLType.TQ2_0.layout)
        made["qs"], made["d"] = part["qs"], part["d"] if exact else 1
        found.append(made.view(np.uint8))
    return found, 1.0 if exact else float(scales[0])


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """The threads that pack. Kept: a model has hundreds of matrices, and starting threads takes as long as packing."""
    return ThreadPoolExecutor(count, thread_name_prefix="kvasir-pack")


def _pieces(rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows, in whole panels, of about CHUNK weights each."""
    count = max(1, CHUNK // (cols * PANEL)) * PANEL
    for first in range(0, rows, count):
        yield first, min(first + count, rows)


def _take(parts: list[np.ndarray], first: int, last: int) -> np.ndarray:
    """Rows [first, last) of the joined parts; copied only if they span several parts."""
    taken, start = [], 0
    for part in parts:
        piece = part[max(first - start, 0) : max(last - start, 0)]
        if len(piece):
            taken.append(piece)
        start += len(part)
    rows = taken[0] if len(taken) == 1 else np.concatenate(taken)
    return rows if rows.strides[1] == 1 else np.ascontiguousarray(rows)


def allocate(nbytes: int) -> np.ndarray:
    """uint8 [nbytes] in its own pages, huge pages for large sizes if the system has them."""
    is_big = nbytes >= _HUGE_PAGE
    size = nbytes + (_HUGE_PAGE if is_big else 0)
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    pages = mmap.mmap(-1, size, **private)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % _HUGE_PAGE if is_big else 0
    if is_big and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return memory[start : start + nbytes]
