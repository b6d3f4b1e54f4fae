"""Weight matrices on a device, in the layouts of the Triton kernels, packed once at load.

Quantized weights are packed in chunks of CHUNK columns, as 32-bit words that each hold the codes of several pairs of
neighbouring columns. A code in the lower half of a word and the one 16 bits above it are a pair, so one mask decodes
both, and the kernels read words of neighbouring columns in one wide load.

    bits  words per chunk      word i, bits b and b + 16, hold columns 2i and 2i + 1 of
    4     16                   group b / 4, of 32 columns
    8     2 x 16               group b / 8 of two, of 32 columns, in each half of the chunk
    8     32                   half b / 8 of the chunk                                       (F8_*, I8_ROW)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from kvasir.device import core_counts
from kvasir.ops.graph import CannotTrace
from kvasir.quant.blocks import fields
from kvasir.quant.blocks_k import six_bit_scales
from kvasir.quant.gguf_types import GGMLType

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Put = Callable[[np.ndarray], Any]

MAX_SEGMENTS = 8
PROGRAMS = 256  # programs that fill a device
SEGMENT = 256  # columns that are worth a program of their own
STEP = 64  # columns per step of the sum over K, for 16-bit weights
CHUNK = 128
_PIECE = 1 << 20  # weights packed at a time
_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Layout(NamedTuple):
    """How a quantized format is packed. bits: of a code. group: columns that share a scale, None for a whole row."""

    bits: int
    group: int | None


LAYOUTS = {
    "Q4_0": Layout(4, 32),
    "Q4_K": Layout(4, 32),
    "MXFP4": Layout(4, 32),
    "Q8_0": Layout(8, 32),
    "F8_BLOCK": Layout(8, 128),
    "F8_ROW": Layout(8, None),
    "I8_ROW": Layout(8, None),
}
FORMATS = (*_FLOATS.values(), *LAYOUTS)
GGUF = ("Q4_0", "Q4_K", "MXFP4", "Q8_0")


@dataclass(frozen=True, eq=False)
class DeviceMatrix:
    """A weight matrix [rows, cols] on the device. segments: S, of the sum over cols. dtype: of input rows, which
    products round to it. C: chunks of columns, the last one padded.

    format       data                 scales                              mins
    F32, ...     its own [N, K]
    Q4_0         int32 [N, C * 16]    float16 [N, C * 4]
    Q8_0         int32 [N, C * 32]    float16 [N, C * 4]
    MXFP4        int32 [N, C * 16]    exponents, uint8 [N, C * 4]
    Q4_K         int32 [N, C * 16]    scale + 256 * min, int16 [N, C * 4]  two float16, int32 [N, K / 256]
    F8_BLOCK     int32 [N, C * 32]    float32 [N, C]
    F8_ROW, ...  int32 [N, C * 32]    float32 [N, 1]
    """

    format: str
    rows: int
    cols: int
    segments: int
    dtype: str
    data: Tensor
    scales: Tensor | None = None
    mins: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols

    @property
    def planes(self) -> list[Tensor]:
        return [plane for plane in (self.data, self.scales, self.mins) if plane is not None]

    def row(self, index: int) -> Tensor:
        """Row `index` of a float matrix as float32 [cols]. Raises CannotTrace for a quantized one."""
        if self.format in LAYOUTS:
            raise CannotTrace(f"a single row of a table in {self.format}")
        return self.data[index].float()

    @property
    def nbytes(self) -> int:
        return sum(plane.numel() * plane.element_size() for plane in self.planes)


def can_read(format: str) -> bool:
    """Whether a matrix of this format can be packed as it is."""
    return format in FORMATS


def unit(format: str) -> int:
    """Columns that a segment of more than one holds whole multiples of: the `group` of `choose_segments`."""
    return CHUNK if format in LAYOUTS else 1


def choose_segments(rows: int, cols: int, group: int, reduces: bool) -> int:
    """S, the segments of the sum over `cols`: 1, 2, 4 or 8, a function of the shape alone. group: see `unit`. reduces:
    whether the matrix's consumer joins segments.

    The least S that fills the device with programs of 64 rows, of whole steps of SEGMENT columns or more. A matrix too
    small for that has segments of at least 32 columns.
    """
    return launch_parts(rows, most_segments(cols, group)) if reduces else 1


def most_segments(cols: int, group: int) -> int:
    """The most segments of a sum over `cols` that are worth a program each, as in `choose_segments`: ranks may share
    these."""
    for least, multiple in ((SEGMENT, lcm(group, STEP)), (32, lcm(group, 32))):
        for segments in (MAX_SEGMENTS, 4, 2):
            if cols % (segments * multiple) == 0 and cols // segments >= least:
                return segments
    return 1


def launch_parts(rows: int, segments: int) -> int:
    """The least number of parts of the segments that fills the device with programs of 64 rows and one part."""
    return next((s for s in (1, 2, 4) if s < segments and -(-rows // 64) * s >= PROGRAMS), segments)


def matrix_from_floats(values: Any, dtype: str, segments: int, put: Put) -> DeviceMatrix:
    """The matrix of float values [N, K], an array or a tensor in the host's memory, rounded to `dtype`. put: copies an
    array to the device, also one of ml_dtypes.bfloat16."""
    if hasattr(values, "detach"):
        values = _array(values)
    rows, cols = values.shape
    _check_segments(cols, segments, 1)
    data = put(np.ascontiguousarray(values.astype(_DTYPES[dtype], copy=False)))
    return DeviceMatrix(_FLOATS[dtype], rows, cols, segments, dtype, data)


def _array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as an array; NumPy itself has no bfloat16."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def matrix_from_gguf(
    kind: str, raw: np.ndarray, rows: int, cols: int, segments: int, dtype: str, put: Put
) -> DeviceMatrix:
    """The matrix of a GGUF file's rows, uint8 [N, row bytes], with the file's values. kind: one of GGUF."""
    layout, ggml = LAYOUTS[kind], GGMLType[kind]
    if raw.dtype != np.uint8 or raw.shape != (rows, ggml.row_bytes(cols)):
        raise ValueError(f"rows of {kind} are uint8 [{rows}, {ggml.row_bytes(cols)}], not {raw.dtype} {[*raw.shape]}")
    _check_segments(cols, segments, CHUNK)
    data = np.empty((rows, _chunks(cols) * CHUNK * layout.bits // 32), np.int32)

    def pack(first: int, last: int) -> tuple[np.ndarray, np.ndarray | None]:
        blocks = np.ascontiguousarray(raw[first:last]).view(ggml.layout)
        codes, scale, low = _UNPACK[kind](blocks)
        data[first:last] = _words(codes.reshape(last - first, cols), layout)
        return _padded(scale.reshape(last - first, -1), 4 * _chunks(cols)), low

    scales, mins = zip(*_in_pieces(rows, cols, pack), strict=True)
    put_mins = None if mins[0] is None else put(np.concatenate(mins))
    return DeviceMatrix(kind, rows, cols, segments, dtype, put(data), put(np.concatenate(scales)), put_mins)


def matrix_from_codes(codes: np.ndarray, scale: np.ndarray, segments: int, dtype: str, put: Put) -> DeviceMatrix:
    """The matrix of scaled 8-bit weights [N, K]: int8, or float8_e4m3fn (of ml_dtypes, or its bytes as uint8).

    scale: float32, what a code is multiplied with: [N] or [N, 1] per row, or for float8 [ceil(N / 128), ceil(K / 128)]
    per block.
    """
    rows, cols = codes.shape
    is_int, scale = codes.dtype == np.int8, np.asarray(scale, np.float32)
    _check_segments(cols, segments, CHUNK)
    if scale.size == rows and scale.shape in ((rows,), (rows, 1)):
        format, scale = ("I8_ROW" if is_int else "F8_ROW"), scale.reshape(rows, 1)
    elif scale.shape == (-(-rows // CHUNK), _chunks(cols)) and not is_int:
        format, scale = "F8_BLOCK", np.repeat(scale, CHUNK, 0)[:rows]
    else:
        raise ValueError(f"scales of shape {[*scale.shape]} are neither one a row nor one a block of {CHUNK}x{CHUNK}")
    data = np.empty((rows, _chunks(cols) * CHUNK // 4), np.int32)

    def pack(first: int, last: int) -> None:
        data[first:last] = _words(np.ascontiguousarray(codes[first:last]).view(np.uint8), LAYOUTS[format])

    _in_pieces(rows, cols, pack)
    return DeviceMatrix(format, rows, cols, segments, dtype, put(data), put(np.ascontiguousarray(scale)))


def stacked(matrices: Sequence[DeviceMatrix]) -> DeviceMatrix:
    """The rows of several matrices of one format, number of columns and segments, one after the other."""
    first = matrices[0]
    if len({(m.format, m.cols, m.segments, m.dtype) for m in matrices}) != 1:
        raise ValueError("matrices of several formats or numbers of columns cannot be stacked")
    if len(matrices) == 1:
        return first
    import torch

    data, scales, mins = (
        None if planes[0] is None else torch.cat(planes)
        for planes in zip(*((m.data, m.scales, m.mins) for m in matrices), strict=True)
    )
    return replace(first, rows=sum(m.rows for m in matrices), data=data, scales=scales, mins=mins)


def _check_segments(cols: int, segments: int, multiple: int) -> None:
    if cols % (segments * multiple) and (segments > 1 or multiple == 1):
        raise ValueError(f"{cols} columns are not {segments} equal segments of multiples of {multiple}")


def _chunks(cols: int) -> int:
    return -(-cols // CHUNK)


def _in_pieces(rows: int, cols: int, work: Callable[[int, int], T]) -> list[T]:
    """The results of `work(first, last)` for runs of rows, on all processors: NumPy releases Python's lock."""
    count = max(1, _PIECE // cols)
    with ThreadPoolExecutor(core_counts()[1]) as pool:
        return list(pool.map(lambda first: work(first, min(first + count, rows)), range(0, rows, count)))


def _padded(values: np.ndarray, width: int) -> np.ndarray:
    return values if values.shape[1] == width else np.pad(values, ((0, 0), (0, width - values.shape[1])))


def _words(codes: np.ndarray, layout: Layout) -> np.ndarray:
    """Codes, uint8 [n, K], as words, int32; see the module. Bytes of a word are in ascending order of their bits."""
    codes = _padded(codes, _chunks(codes.shape[1]) * CHUNK)
    if layout.bits == 4:
        groups = codes.reshape(len(codes), -1, 2, 2, 16, 2)  # chunk, byte, nibble, word, column of the pair
        packed = (groups[:, :, :, 0] | groups[:, :, :, 1] << np.uint8(4)).transpose(0, 1, 3, 4, 2)
    else:
        parts = 2 if layout.group == 32 else 1
        packed = codes.reshape(len(codes), -1, parts, 2, 32 // parts, 2).transpose(0, 1, 2, 4, 5, 3)
    return np.ascontiguousarray(packed).reshape(len(codes), -1).view("<i4")


_Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def _nibbles(blocks: np.ndarray, scale: str) -> _Unpacked:
    return fields(blocks["qs"].reshape(-1, 16), 16, 4), blocks[scale], None


def _q8_0(blocks: np.ndarray) -> _Unpacked:
    return np.ascontiguousarray(blocks["qs"]).view(np.uint8), blocks["d"], None


def _q4_k(blocks: np.ndarray) -> _Unpacked:
    scales, minima = six_bit_scales(blocks["scales"].reshape(-1, 12))
    pairs = scales.astype(np.int16) | minima.astype(np.int16) << 8
    both = np.stack([blocks["d"], blocks["dmin"]], -1).view(np.int32)[..., 0]
    return fields(blocks["qs"].reshape(-1, 128), 32, 4), pairs.reshape(len(blocks), -1), both


_UNPACK: dict[str, Callable[[np.ndarray], _Unpacked]] = {
    "Q4_0": lambda blocks: _nibbles(blocks, "d"),
    "MXFP4": lambda blocks: _nibbles(blocks, "e"),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
}
