"""Which files of packed weights (packed_file.py) belong to a model: their names begin with the model's key."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from kvasir.environment import packed_dir

_KEY_DIGITS = 16


def model_key(weights: Iterable[Path]) -> str:
    """The key of the model in these files, by where they are."""
    return sha256("".join(f"{path.resolve()}\n" for path in weights).encode()).hexdigest()[:_KEY_DIGITS]


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
