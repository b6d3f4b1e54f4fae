"""Reads JSON and text files of a model folder, within bounds of size and depth."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvasir.errors import ModelFileError

MAX_JSON_BYTES = 64 << 20
MAX_JSON_DEPTH = 32
MAX_TEXT_BYTES = 1 << 20


def read_text(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """The text of a UTF-8 file. Raises `ModelFileError` if it cannot be read or is longer than `max_bytes`."""
    try:
        return _read_bytes(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The JSON value in a file. Raises `ModelFileError` as `parse_json` does, and if the file cannot be read or is
    longer than `max_bytes`. Infinity and NaN are numbers here, since `config.json` files of published models hold them.
    """
    return parse_json(_read_bytes(path, max_bytes), str(path), constants=True)


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """As `read_json`, for a file that must hold an object."""
    return _object(read_json(path, max_bytes), str(path))


def parse_json(text: str | bytes, where: str, constants: bool = False) -> Any:
    """Parses one JSON value. Raises `ModelFileError` for anything else, deep nesting, duplicate keys, and, without
    `constants`, for numbers outside JSON (NaN, Infinity)."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=float if constants else _no_constant)
    except RecursionError as error:
        raise ModelFileError(f"{where}: JSON nested too deeply") from error
    except ValueError as error:  # syntax, encoding, numbers with too many digits
        raise ModelFileError(f"{where}: not valid JSON: {error}") from error
    if _deeper_than(value, MAX_JSON_DEPTH):
        raise ModelFileError(f"{where}: JSON nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def parse_object(text: str, where: str) -> dict[str, Any]:
    """As `parse_json`, for text that must hold an object."""
    return _object(parse_json(text, where), where)


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    try:
        if not path.is_file():
            raise ModelFileError(f"{path}: there is no such file")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from error
    if len(data) > max_bytes:
        raise ModelFileError(f"{path}: the file is larger than {max_bytes} bytes")
    return data


def _object(value: Any, where: str) -> dict[str, Any]:
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


def _deeper_than(value: Any, levels: int) -> bool:
    """Whether the value nests deeper than `levels`. Goes level by level, so that hostile input causes no deep
    recursion."""
    layer = [value]
    for _ in range(levels):
        layer = [inner for outer in layer if isinstance(outer, dict | list) for inner in _children(outer)]
    return any(isinstance(value, dict | list) for value in layer)


def _children(value: dict | list) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value
