"""Reads `tokenizer.model`, SentencePiece's own file, into the metadata that a GGUF would have for it.

Source: sentencepiece_model.proto of the SentencePiece project. The file is one protocol-buffers message; only the
pieces (field 1), the trainer's settings (2) and the normalizer's settings (3) are used. Reading these few fields needs
no library; the piece types have the same numbers as in GGUF.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.text.gguf_vocab import PREFIX

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_KINDS = {1: "t5", 2: "llama"}  # TrainerSpec.ModelType: unigram, BPE
_NORMAL = 1


def read_sentencepiece(path: Path) -> dict[str, object]:
    """The model as `tokenizer.ggml.*` metadata. `add_bos_token` and `add_eos_token` are false, since the file does not
    contain them. Raises `ModelFileError` if the file is malformed."""
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in fields if number == 1]
        trainer = _message(fields, 2)
        normalizer = _message(fields, 3)
        return _metadata(pieces, trainer, normalizer)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        if isinstance(error, UnsupportedModel):
            raise
        raise ModelFileError(
            f"{path.name} is not a SentencePiece model ({error})",
            "a tiktoken file with this name needs a tokenizer.json in the same folder",
        ) from error


def _metadata(pieces: list[dict], trainer: dict, normalizer: dict) -> dict[str, object]:
    kind = trainer.get(3, 1)
    if kind not in _KINDS:
        raise UnsupportedModel(f"SentencePiece models of type {kind} are not supported: only unigram and BPE")
    metadata: dict[str, object] = {
        "model": _KINDS[kind],
        "tokens": [piece[1].decode() for piece in pieces],
        "scores": [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces],
        "token_type": [piece.get(3, _NORMAL) for piece in pieces],
        "precompiled_charsmap": normalizer.get(2, b""),
        "add_space_prefix": bool(normalizer.get(3, 1)),
        "remove_extra_whitespaces": bool(normalizer.get(4, 1)),
        "add_bos_token": False,
        "add_eos_token": False,
    }
    for role, field, default in (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("padding", 43, -1)):
        value = trainer.get(field, default)
        metadata[f"{role}_token_id"] = -1 if value >> 31 else value  # -1 is written as a 64-bit two's complement
    return {PREFIX + key: value for key, value in metadata.items()}


def _message(fields: list[tuple], number: int) -> dict:
    return dict(_fields(next((value for n, value in fields if n == number), b"")))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of each field of a message: an int for a varint, bytes for anything else."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire not in (_BYTES, _FIXED32, _FIXED64):
            raise ValueError(f"wire type {wire} at byte {position}")
        if wire == _BYTES:
            size, position = _varint(data, position)
        else:
            size = 4 if wire == _FIXED32 else 8
        if size > len(data) - position:
            raise ValueError(f"a field of {size} bytes at byte {position} of {len(data)}")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise ValueError("the file ends inside a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError(f"a number of more than 64 bits at byte {position}")
