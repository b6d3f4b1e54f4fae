"""How far a long change of the store is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """completed, total: bytes of the file that is known by `digest` (its SHA-256 in hexadecimal, or ""); 0 where there
    is nothing to count."""

    status: str
    completed: int = 0
    total: int = 0
    digest: str = ""


Report = Callable[[Progress], None]
