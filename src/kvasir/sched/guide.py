"""Guides as the scheduler sees them: the state of one sequence in its grammar, and its factory. See guided.guide."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvasir.errors import KvasirError


class Guide(Protocol):
    """The state of one sequence in its grammar. `allowed` returns a mask, None if every id is allowed. The methods
    raise KvasirError."""

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
    """The grammar state of a sequence; see the module `guidance`.

    compiling: the future of the compiled grammar, None once there is a guide. astray: the error that the guide raised
    instead of returning a mask. pending_forced: ids that are forced after the id that a pending step samples.
    unplanned_ids: known ids that no plan has carried to the runner yet, and the pending forced ids. jumps: whether
    forced ids are taken unsampled.
    """

    guide: Guide | None = None
    compiling: Future[Any] | None = None
    astray: KvasirError | None = None
    pending_forced: list[int] = field(default_factory=list)
    unplanned_ids: list[int] = field(default_factory=list)
    jumps: bool = False

    def take_pending_forced(self) -> list[int]:
        """Returns and clears the pending forced ids, which are known once the id before them is."""
        forced, self.pending_forced = self.pending_forced, []
        return forced

    def take_unplanned(self) -> list[int]:
        """Returns and clears the unplanned ids: a plan carries them to the runner."""
        unplanned, self.unplanned_ids = self.unplanned_ids, []
        return unplanned


class Guides(Protocol):
    """Makes guides. `begin` compiles in the background; `take` raises KvasirError if that failed. `ends`: whether the
    grammar determines where a sequence ends."""

    def begin(self, rule: str) -> Future[Any]: ...

    def ends(self, rule: str) -> bool: ...

    def take(self, compiled: Future[Any], ids: Iterable[int] = ()) -> Guide: ...
