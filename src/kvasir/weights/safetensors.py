"""Mapped safetensors files: one file, or a folder with one file or with shards and an index.

Source: the safetensors format (README of huggingface/safetensors, version 0.8).

    length of the header u64, little-endian | header, a JSON object | the tensors' bytes
    header: {"name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, ..., "__metadata__": {...}}

The file is assumed to be hostile: the header's length is checked before it is read, and the tensors must fill the rest
of the file without gap or overlap, each with the number of bytes that its shape and dtype require.
"""

import re
import struct
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvasir.errors import MAX_QUOTED, ModelFileError, UnsupportedModel, bounded, quoted
from kvasir.json_file import parse_object, read_json_object
from kvasir.weights.mapped import MappedFile, TensorInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's limit
MAX_NAME_BYTES = 255  # the limit of file names
MAX_DIMS = 64  # the limit of NumPy

_SHARD_NAME = re.compile(r"-\d+-of-\d+\.safetensors$")

# Bits per element, and the type's name in NumPy or ml_dtypes if its elements are whole bytes.
DTYPES: dict[str, tuple[int, str | None]] = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, None),
}


class SafetensorsFile:
    """One mapped file. It owns the mapping; `raw` and `array` share its memory.

    tensors: names to `TensorInfo`. metadata: the header's free-form part (strings to strings).
    """

    def __init__(self, path: str | Path):
        """Raises `ModelFileError` if the file is missing or malformed."""
        self._file = MappedFile(path)
        self.path = self._file.path
        try:
            header, self._data_start = _read_header(self._file)
            self.metadata = _read_metadata(self._file, header.pop("__metadata__", {}))
            self._offsets, self.tensors = _read_entries(self._file, header, self._data_start)
        except BaseException:
            self.close()
            raise

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes: uint8 [nbytes], a read-only view of the mapping."""
        return self._file.view(self._offsets[name], self.tensors[name].nbytes)

    def array(self, name: str) -> np.ndarray:
        """A tensor in the file's number type; it shares the mapping's memory.

        Raises `UnsupportedModel` for floats of 4 or 6 bits."""
        info = self.tensors[name]
        kind = DTYPES[info.dtype][1]
        if kind is None:
            raise UnsupportedModel(
                f"{self.path}: {quoted(name)} is {info.dtype}, which has no arithmetic here",
                "use the model's checkpoint in float32, float16 or bfloat16, or a GGUF file of it",
            )
        dtype = np.dtype(getattr(np, kind, None) or getattr(ml_dtypes, kind))
        return self._file.array(self._offsets[name], dtype, info.shape, info.nbytes)

    def drop(self, name: str) -> None:
        """Returns a tensor's pages to the system."""
        self._file.drop(self._offsets[name], self.tensors[name].nbytes)

    def close(self) -> None:
        """Unmaps the file when the last view is gone."""
        self._file.close()


class SafetensorsFolder:
    """All tensors of a model folder (or of one file), across its files. It owns the mappings."""

    def __init__(self, path: str | Path):
        """Raises `ModelFileError` if the folder has no weights, or if shards are missing or malformed."""
        path = Path(path)
        self._files: list[SafetensorsFile] = []
        self._file_of: dict[str, SafetensorsFile] = {}
        try:
            if path.is_dir() and (path / INDEX).exists():
                self._open_shards(path, read_index(path))
            else:
                file = SafetensorsFile(weight_files(path)[0] if path.is_dir() else path)
                self._files.append(file)
                self._file_of = dict.fromkeys(file.tensors, file)
        except BaseException:
            self.close()
            raise
        self.metadata = {key: text for file in self._files for key, text in file.metadata.items()}

    def names(self) -> list[str]:
        """The names of all tensors, file by file in the order of their headers."""
        return list(self._file_of)

    def info(self, name: str) -> TensorInfo:
        """Shape, dtype, size in bytes and file of a tensor. Raises `KeyError` for an unknown name."""
        return self._file_of[name].tensors[name]

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes: uint8 [nbytes], a read-only view of the mapping."""
        return self._file_of[name].raw(name)

    def array(self, name: str) -> np.ndarray:
        """A tensor in the file's number type; it shares the mapping's memory.

        Raises `UnsupportedModel` for floats of 4 or 6 bits."""
        return self._file_of[name].array(name)

    def drop(self, name: str) -> None:
        """Returns a tensor's pages to the system."""
        self._file_of[name].drop(name)

    def close(self) -> None:
        """Unmaps all files when their last views are gone."""
        for file in self._files:
            file.close()

    def __enter__(self) -> "SafetensorsFolder":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _open_shards(self, folder: Path, index: dict[str, str]) -> None:
        shards = {shard: SafetensorsFile(folder / shard) for shard in sorted(set(index.values()))}
        self._files = list(shards.values())
        for name, shard in index.items():
            if name not in shards[shard].tensors:
                raise ModelFileError(f"{folder / shard}: tensor {quoted(name)} is missing, although {INDEX} lists it")
            self._file_of[name] = shards[shard]


def read_index(folder: Path) -> dict[str, str]:
    """The index of a sharded folder: tensor names to file names, which are all plain names in this folder.

    Raises `ModelFileError` if the index is malformed or points outside the folder, or if shards are missing.
    """
    index = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ModelFileError(f"{folder / INDEX}: there is no 'weight_map', expected tensor names to file names")
    missing = []
    for shard in sorted(set(map(str, index.values()))):
        if not _is_plain_name(shard):
            raise ModelFileError(
                f"{folder / INDEX}: {quoted(shard)} is not a plain name of a .safetensors file",
                "download the index again: shards must be in the model's folder, with the names in the index",
            )
        if not _is_file(folder / shard):
            missing.append(shard)
    if missing:
        listed = ", ".join(bounded(name, MAX_QUOTED) for name in missing[:5])
        listed += " and more" if len(missing) > 5 else ""
        raise ModelFileError(f"{folder}: {len(missing)} shards are missing: {listed}", "download them too")
    return {name: str(shard) for name, shard in index.items()}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a folder's weights: the index's shards, or the single file.

    Raises `ModelFileError` if there are none, or several without an index.
    """
    if (folder / INDEX).exists():
        return [folder / shard for shard in sorted(set(read_index(folder).values()))]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1 or _SHARD_NAME.search(found[0].name):
        names = ", ".join(path.name for path in found[:5]) or "none"
        raise ModelFileError(
            f"{folder}: expected {INDEX}, {SINGLE} or a single .safetensors file, found {names}",
            "shards need their index",
        )
    return found


def _is_plain_name(shard: str) -> bool:
    """Whether the text is a valid .safetensors file name in this folder: no path, and not too long for file systems."""
    length = len(shard.encode(errors="surrogatepass"))
    return shard.endswith(".safetensors") and length <= MAX_NAME_BYTES and not any(c in shard for c in "/\\:\0")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the path is too long for a file to exist
        return False


def _read_header(file: MappedFile) -> tuple[dict[str, Any], int]:
    if file.size < 8:
        file.refuse(f"{file.size} bytes are too few for a safetensors file")
    (length,) = struct.unpack_from("<Q", file.map)
    if length > min(file.size - 8, MAX_HEADER_BYTES):
        file.refuse(
            f"the header length is {length} bytes, but the file has {file.size - 8} left "
            f"and the format allows {MAX_HEADER_BYTES}",
            "this is not a safetensors file, or it is damaged",
        )
    try:
        text = file.map[8 : 8 + length].decode()
    except UnicodeDecodeError as error:
        file.refuse(f"the header is not UTF-8: {error.reason}")
    return parse_object(text, str(file.path)), 8 + length


def _read_metadata(file: MappedFile, metadata: Any) -> dict[str, str]:
    if metadata is None:  # as MLX writes it
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        file.refuse("'__metadata__' is not an object of strings")
    return metadata


def _read_entries(
    file: MappedFile, header: dict[str, Any], data_start: int
) -> tuple[dict[str, int], dict[str, TensorInfo]]:
    """The tensors' offsets in the file, and their descriptions."""
    offsets, tensors, spans = {}, {}, []
    for name, entry in header.items():
        dtype, shape, (start, stop) = _read_entry(file, name, entry)
        num_bits = prod(shape) * DTYPES[dtype][0]
        if num_bits != (stop - start) * 8:
            file.refuse(
                f"tensor {name[:100]!r} has {stop - start} bytes, "
                f"expected {num_bits / 8:g} for {dtype} of shape {shape}"
            )
        spans.append((start, stop))
        offsets[name] = data_start + start
        tensors[name] = TensorInfo(name, shape, dtype, stop - start, file.path)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            file.refuse(f"the tensors leave a gap or overlap at byte {min(start, end)} of the data")
        end = stop
    if end != file.size - data_start:
        file.refuse(
            f"the tensors fill {end} bytes, the file has {file.size - data_start}",
            "the file is damaged or was not downloaded completely",
        )
    return offsets, tensors


def _read_entry(file: MappedFile, name: str, entry: Any) -> tuple[str, tuple[int, ...], list[int]]:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        file.refuse(f"tensor {name[:100]!r} has dtype {str(dtype)[:100]!r}, expected one of {', '.join(DTYPES)}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMS or prod(size or 1 for size in shape) >= 2**63:
        file.refuse(f"tensor {name[:100]!r} has a shape that is not a list of sizes, or too large")
    if not _is_sizes(span) or len(span) != 2 or not span[0] <= span[1]:
        file.refuse(f"tensor {name[:100]!r} has data_offsets that are not [start, stop]")
    return dtype, tuple(shape), span


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
