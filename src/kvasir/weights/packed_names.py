"""Which files of packed weights (packed_file.py) belong to a model, and which to the same way of running it.

A single process has MODEL-SET, one of several processes that share a model MODEL-SET-1of2.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from kvasir.environment import packed_dir

_KEY_DIGITS = 16
_SET_DIGITS = 32


def model_key(weights: Iterable[Path]) -> str:
    """The key of the model in these files, by where they are."""
    return sha256("".join(f"{path.resolve()}\n" for path in weights).encode()).hexdigest()[:_KEY_DIGITS]


def file_key(model: str, digest: str, number: int, count: int) -> str:
    """The key of a file. digest: of what decides the bytes of the files of all `count` processes, of which this one is
    `number`."""
    return f"{model}-{digest[:_SET_DIGITS]}" + (f"-{number}of{count}" if count > 1 else "")


def set_of(key: str) -> str:
    """What the keys of the processes that share a model have in common."""
    return "-".join(key.split("-")[:2])


def remove_packed(weights: Iterable[Path]) -> int:
    """Removes the packed files of the model in these files, and returns their bytes. A running engine that has one open
    keeps reading it. Files that cannot be removed stay."""
    freed = 0
    with suppress(OSError, RuntimeError):  # there is no such folder, or no home
        for path in packed_dir().glob(f"{model_key(weights)}-*.weights"):
            with suppress(OSError):
                path.with_suffix(".json").unlink(missing_ok=True)
                size = path.stat().st_size
                path.unlink()
                freed += size
    return freed
