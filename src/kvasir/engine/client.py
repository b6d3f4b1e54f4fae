"""The one protocol below every edge: an engine that takes Requests and streams Deltas, ids in and ids out.

Three bodies: `inproc.InProcessEngine` (a thread beside the caller), `subprocess.ProcessEngine` (its own process over
a Unix socket, supervised), `fake.FakeEngine` (the real scheduler and pool over the FakeRunner: no torch).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kvasir.snapshot import Snapshot
from kvasir.types import Delta, EngineStats, ModelInfo, Request


@dataclass(frozen=True, slots=True)
class EngineState:
    """status: "ok"; "starting"; "restarting", from a death to the next start; "engine does not answer"; "ended".
    reason: of the last end or failure. attempts: to start it again, since it last ran for a while. next_attempt:
    seconds since 1970."""

    status: str = "ok"
    reason: str = ""
    attempts: int = 0
    next_attempt: float | None = None


class Engine(Protocol):
    """What an edge may do with an engine. All methods are called from one asyncio loop."""

    @property
    def info(self) -> ModelInfo:
        """The model served; valid once `start` has returned."""
        ...

    @property
    def summary(self) -> tuple[str, ...]:
        """Lines for people that say what the engine decided; empty before `start`."""
        ...

    @property
    def ended(self) -> bool:
        """Whether it takes no more requests, and never will: it was stopped, or died for good."""
        ...

    @property
    def state(self) -> EngineState:
        """What is known of it without asking it."""
        ...

    async def start(self) -> None:
        """Ready to take requests when it returns. Raises KvasirError when the model cannot be loaded."""
        ...

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Streams the deltas of all answers of the request, in the order of the steps.

        Every answer's last delta has a finish reason; the iterator ends after the last answer's. Closing the iterator
        early (aclose, cancellation) aborts the request. Raises, at the first `anext`: InvalidRequest when the request
        can never fit, QueueFull at the queue's bound, EngineDead when the engine died and could not resume it.
        """
        ...

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends one answer, or all of the request, without a further delta being owed. Unknown ids are no error."""
        ...

    async def stats(self) -> EngineStats:
        """A fresh snapshot, asked of the engine itself. Raises EngineDead."""
        ...

    async def look(self) -> Snapshot:
        """What the engine looks like now, in more detail. Raises EngineDead."""
        ...

    async def alive(self, timeout: float = 1.0) -> bool:
        """Whether the engine's loop answers within `timeout` seconds."""
        ...

    async def stop(self, drain: float = 0.0) -> None:
        """Takes no more requests, lets running ones finish for up to `drain` seconds, then ends them and itself."""
        ...
