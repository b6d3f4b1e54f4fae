"""Guides as the scheduler sees them: where an answer stands in its grammar, and what makes them. See guided.guide."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Protocol


class Guide(Protocol):
    """Where one answer stands in its grammar. `allowed` is None where everything is. The methods raise
    KvasirError."""

    @property
    def done(self) -> bool: ...

    @property
    def quiet(self) -> bool: ...

    def allowed(self) -> bytes | None: ...

    def forced(self) -> list[int]: ...

    def advance(self, ids: Iterable[int]) -> None: ...

    def copy(self) -> Guide: ...


class Guides(Protocol):
    """Makes guides; `begin` compiles elsewhere and `take` raises KvasirError where that failed. `ends`: whether it is
    the grammar that says where an answer ends."""

    def begin(self, rule: str) -> Future[Any]: ...

    def ends(self, rule: str) -> bool: ...

    def take(self, compiled: Future[Any], ids: Iterable[int] = ()) -> Guide: ...
