"""One GGUF file, mapped and read lazily: the metadata immediately, the tensors as views.

Source: the GGUF specification (docs/gguf.md of the ggml project), versions 2 and 3, little-endian.

    magic "GGUF" | version u32 | number of tensors u64 | number of pairs u64
    pairs:   key string | type u32 | value
    tensors: name string | number of dimensions u32 | dimensions u64, innermost first | type u32 | offset u64
    padding to `general.alignment`, then the tensors' bytes; offsets count from here

A string is a u64 length and UTF-8 bytes; an array is an element type u32, a u64 count and its elements.

The file is assumed to be hostile. Counts and lengths are checked against the remaining bytes before anything is read or
allocated, so memory use is a small multiple of the header's size. Besides violations of the format, these raise
ModelFileError: duplicate keys and tensor names, overlapping tensors, dimensions of zero, text that is not UTF-8. Gaps
between tensors are allowed.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

from kvasir.quant.gguf_types import GGMLType
from kvasir.weights.gguf_cursor import Cursor
from kvasir.weights.mapped import MappedFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32

MAX_DIMS = 4  # the format's limit
MAX_KEY_BYTES = 65535  # the format's limit
MAX_NAME_BYTES = 64  # the format's limit

# Minimum bytes of an entry, which bound a count before the entries are read.
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor's entry. shape: outermost first, as in NumPy. offset: from the file's first byte."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLType
    offset: int
    nbytes: int


class GGUFFile:
    """A mapped GGUF file. It owns the mapping; arrays in `metadata` are copies, `data` returns views.

    metadata: keys to int, float, bool or str; arrays of numbers and bools are numpy arrays, arrays of strings and of
    arrays are lists. tensors: in the file's order.
    """

    def __init__(self, path: str | Path):
        """Raises `ModelFileError` if the file is missing, malformed or of an unsupported version."""
        self._file = MappedFile(path)
        self.path = self._file.path
        try:
            cursor = Cursor(self._file)
            num_tensors, num_pairs = _read_header(cursor)
            self.metadata: dict[str, object] = _read_metadata(cursor, num_pairs)
            self.tensors: dict[str, GGUFTensor] = _read_tensors(cursor, num_tensors, _alignment(cursor, self.metadata))
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> np.ndarray:
        """A tensor's bytes: uint8 [rows, bytes per row], a read-only view of the mapping."""
        tensor = self.tensors[name]
        row_bytes = tensor.ggml_type.row_bytes(tensor.shape[-1] if tensor.shape else 1)
        return self._file.view(tensor.offset, tensor.nbytes).reshape(-1, row_bytes)

    def array(self, name: str, dtype: np.dtype) -> np.ndarray:
        """A tensor of a plain type, as an array that shares the mapping's memory."""
        tensor = self.tensors[name]
        assert tensor.ggml_type.is_plain and tensor.ggml_type.type_size == dtype.itemsize
        return self._file.array(tensor.offset, dtype, tensor.shape, tensor.nbytes)

    def drop(self, name: str) -> None:
        """Returns a tensor's pages to the system."""
        tensor = self.tensors[name]
        self._file.drop(tensor.offset, tensor.nbytes)

    def close(self) -> None:
        """Unmaps the file when the last view is gone."""
        self._file.close()

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _read_header(cursor: Cursor) -> tuple[int, int]:
    magic = cursor.take(4, "bytes of magic")
    if magic != MAGIC:
        cursor.refuse(f"this is not a GGUF file: it begins with {magic!r}, expected {MAGIC!r}")
    version = cursor.u32("the version")
    if version and not version & 0xFFFF:
        cursor.refuse("this GGUF file is big-endian, expected little-endian", "convert it for this machine")
    if version not in VERSIONS:
        cursor.refuse(f"this GGUF file has version {version}, expected one of {VERSIONS}", "convert the model again")
    num_tensors, num_pairs = cursor.u64("the number of tensors"), cursor.u64("the number of pairs")
    cursor.need(num_pairs, _MIN_PAIR_BYTES, "metadata pairs")
    cursor.need(num_tensors, _MIN_TENSOR_BYTES, "tensor entries")
    return num_tensors, num_pairs


def _read_metadata(cursor: Cursor, num_pairs: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for _ in range(num_pairs):
        key = cursor.string("a metadata key", MAX_KEY_BYTES)
        if not key or key in metadata:
            cursor.refuse(f"metadata key {key[:100]!r} is empty or comes twice")
        what = repr(key[:100])
        metadata[key] = cursor.value(cursor.u32(f"the type of {what}"), what)
    return metadata


def _alignment(cursor: Cursor, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        cursor.refuse(f"general.alignment is {alignment!r}, expected a power of two")
    return alignment


def _read_tensors(cursor: Cursor, num_tensors: int, alignment: int) -> dict[str, GGUFTensor]:
    entries: dict[str, tuple[tuple[int, ...], GGMLType, int]] = {}
    for _ in range(num_tensors):
        name = cursor.string("a tensor name", MAX_NAME_BYTES)
        if not name or name in entries:
            cursor.refuse(f"tensor name {name!r} is empty or comes twice")
        entries[name] = _read_entry(cursor, name)
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, (shape, ggml_type, offset) in entries.items():
        nbytes = ggml_type.row_bytes(prod(shape))
        if offset % alignment:
            cursor.refuse(f"tensor {name!r} lies at {offset}, expected a multiple of {alignment}")
        if data_start + offset + nbytes > cursor.size:
            cursor.refuse(
                f"tensor {name!r} ends at byte {data_start + offset + nbytes}, the file at {cursor.size}",
                "the file is damaged or was not downloaded completely",
            )
        tensors[name] = GGUFTensor(name, shape, ggml_type, data_start + offset, nbytes)
    _refuse_overlaps(cursor, tensors)
    return tensors


def _read_entry(cursor: Cursor, name: str) -> tuple[tuple[int, ...], GGMLType, int]:
    """A tensor's shape, type and offset in the data, which follow its name in the file."""
    num_dims = cursor.u32(f"the dimensions of {name!r}")
    if num_dims > MAX_DIMS:
        cursor.refuse(f"tensor {name!r} has {num_dims} dimensions, expected at most {MAX_DIMS}")
    shape = tuple(cursor.u64(f"the dimensions of {name!r}") for _ in range(num_dims))[::-1]
    type_id = cursor.u32(f"the type of {name!r}")
    try:
        ggml_type = GGMLType(type_id)
        if ggml_type.is_own:
            raise ValueError
    except ValueError:
        cursor.refuse(
            f"tensor {name!r} has the unknown type {type_id}",
            "the file may be newer than this version of Kvasir",
        )
    row_length = shape[-1] if shape else 1
    if not all(shape) or row_length % ggml_type.block_size:
        cursor.refuse(
            f"tensor {name!r} of type {ggml_type.name} has shape {shape}, expected nonzero sizes "
            f"and rows in multiples of {ggml_type.block_size}"
        )
    return shape, ggml_type, cursor.u64(f"the offset of {name!r}")


def _refuse_overlaps(cursor: Cursor, tensors: dict[str, GGUFTensor]) -> None:
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            cursor.refuse(f"tensors {before.name!r} and {after.name!r} overlap")
