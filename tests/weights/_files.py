"""Small model files written by hand, field by field, so that tests can write wrong ones as well."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = dict(zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIifBQqd", strict=True))


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(kind: int, content) -> bytes:
    """A metadata value; an array's content is (element type, list of contents)."""
    if kind == STRING:
        return text(content)
    if kind == ARRAY:
        inner, items = content
        return struct.pack("<IQ", inner, len(items)) + b"".join(value(inner, item) for item in items)
    return struct.pack("<" + _CODES[kind], content)


def pair(key: str | bytes, kind: int, content) -> bytes:
    return text(key) + struct.pack("<I", kind) + value(kind, content)


def entry(name: str | bytes, ne: Sequence[int], type_id: int, offset: int) -> bytes:
    """A tensor's entry; `ne` is innermost first, as in the file."""
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, type_id, offset)


def gguf_bytes(
    pairs: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    num_tensors, num_pairs = counts or (len(entries), len(pairs))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + b"".join([*pairs, *entries])
    return head + bytes(-len(head) % alignment) + data


def small_gguf() -> bytes:
    """A valid file with every kind of value and several types of tensors."""
    numbers = (U8, I8, U16, I16, U32, I32, U64, I64)
    pairs = [
        pair("general.architecture", STRING, "llama"),
        *(pair(f"number.{kind}", kind, 3) for kind in numbers),
        pair("number.f32", F32, 0.5),
        pair("number.f64", F64, -0.25),
        pair("flag", BOOL, 1),
        pair("words", ARRAY, (STRING, ["a", "", "Käse"])),
        pair("scores", ARRAY, (F32, [1.0, 2.5])),
        pair("flags", ARRAY, (BOOL, [0, 1, 1])),
        pair("none", ARRAY, (U16, [])),
        pair("nested", ARRAY, (ARRAY, [(I32, [1, -2]), (ARRAY, [(STRING, ["x"])])])),
    ]
    entries = [entry("a", [32, 2], 2, 0), entry("b", [3], 0, 64), entry("c", [], 30, 96)]
    return gguf_bytes(pairs, entries, bytes(range(100)))


def safetensors_bytes(header: dict | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    if isinstance(header, dict):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor_entry(dtype: str, shape: list[int], start: int, stop: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def hf_folder(folder: Path, **files: str) -> Path:
    """A model folder with a configuration, one tensor and `files` (dots in names as double underscores)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    weights = safetensors_bytes({"w": tensor_entry("F32", [2], 0, 8)}, np.ones(2, "<f4").tobytes())
    (folder / "model.safetensors").write_bytes(weights)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder
