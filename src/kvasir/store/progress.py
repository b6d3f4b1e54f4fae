"""Progress of a long change of the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PullProgress:
    """completed, total: bytes of the file that `digest` identifies (its SHA-256 in hexadecimal, or ""); 0 if no bytes
    are counted."""

    status: str
    completed: int = 0
    total: int = 0
    digest: str = ""


Report = Callable[[PullProgress], None]
