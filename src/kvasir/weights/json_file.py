"""Reads JSON and text files of a model folder, with size limits."""

import json
from pathlib import Path
from typing import Any

from kvasir.errors import ModelFileError

MAX_JSON_BYTES = 64 << 20
MAX_TEXT_BYTES = 1 << 20


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a UTF-8 file. Raises `ModelFileError` if it cannot be read or is longer than `max_bytes`."""
    try:
        if not path.is_file():
            raise ModelFileError(f"{path}: there is no such file")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ModelFileError(f"{path}: the file is larger than {max_bytes} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Raises `ModelFileError` if it holds anything else."""
    return parse_object(read_text(path, max_bytes), str(path))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Parses one JSON object. Raises `ModelFileError` for anything else, duplicate keys, and numbers outside JSON (NaN,
    Infinity)."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError as error:
        raise ModelFileError(f"{where}: JSON nested too deeply") from error
    except ValueError as error:
        raise ModelFileError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: a JSON {type(value).__name__}, expected an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
