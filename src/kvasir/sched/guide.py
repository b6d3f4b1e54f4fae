"""Guides as the scheduler sees them: where an answer stands in its grammar, and what makes them. See guided.guide."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvasir.errors import KvasirError


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


@dataclass(slots=True, eq=False)
class Guidance:
    """Where an answer stands that follows a grammar; see the module guidance.

    compiling: what the guide is made of, as long as there is none. astray: why the guide cannot say what may come next.
    coming: ids that are forced after one that a step under way samples. untold: known ids that the runner has not been
    told of, and those coming. jumps: whether what is forced is taken at once.
    """

    guide: Guide | None = None
    compiling: Future[Any] | None = None
    astray: KvasirError | None = None
    coming: list[int] = field(default_factory=list)
    untold: list[int] = field(default_factory=list)
    jumps: bool = False

    def take_coming(self) -> list[int]:
        """The id before them is known: they are, too."""
        coming, self.coming = self.coming, []
        return coming

    def tell(self) -> list[int]:
        """The runner is told of all."""
        untold, self.untold = self.untold, []
        return untold


class Guides(Protocol):
    """Makes guides; `begin` compiles elsewhere and `take` raises KvasirError where that failed. `ends`: whether it is
    the grammar that says where an answer ends."""

    def begin(self, rule: str) -> Future[Any]: ...

    def ends(self, rule: str) -> bool: ...

    def take(self, compiled: Future[Any], ids: Iterable[int] = ()) -> Guide: ...
