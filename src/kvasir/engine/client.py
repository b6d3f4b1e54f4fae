"""The engine protocol below every server and API: an engine takes Requests and streams Deltas, ids in and ids out.

Implementations: `inproc.InProcessEngine` (a thread in the caller's process), `subprocess.ProcessEngine` (a supervised
process connected by a Unix socket), `remote.RemoteEngine` (the engine of another process or machine),
`fleet.engine.FleetEngine` (several engines as one), `fake.FakeEngine` (the real scheduler and pool over the FakeRunner:
no torch).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvasir.kv.changes import CacheChanges
from kvasir.snapshot import Snapshot
from kvasir.statistics import EngineStats
from kvasir.types import AdapterInfo, Delta, ModelInfo, Request

ASLEEP = "asleep"


@dataclass(frozen=True, slots=True)
class EngineState:
    """status: "ok"; "starting"; "restarting", from a crash to the next start; "engine does not answer"; "asleep";
    "ended".
    reason: of the last end or failure. attempts: restarts tried since it last ran for a while. next_attempt: in seconds
    since 1970. trying: requests that may have killed it are tried apart, and others wait meanwhile."""

    status: str = "ok"
    reason: str = ""
    attempts: int = 0
    next_attempt: float | None = None
    trying: bool = False


class Engine(Protocol):
    """What a server may call on an engine. All methods are called from one asyncio loop."""

    @property
    def info(self) -> ModelInfo:
        """The served model; valid once `start` has returned."""
        ...

    @property
    def summary(self) -> tuple[str, ...]:
        """Lines for users that describe the engine's decisions; empty before `start`."""
        ...

    @property
    def ended(self) -> bool:
        """Whether it will never take requests again: it was stopped, or crashed for good."""
        ...

    @property
    def state(self) -> EngineState:
        """The engine's state as far as it is known without querying the engine."""
        ...

    async def start(self) -> None:
        """Returns when the engine takes requests. Raises KvasirError if the model cannot be loaded."""
        ...

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        """Streams the deltas of all choices of the request, in the order of the steps.

        The last delta of each choice has a finish reason; the iterator ends after the last choice has ended. Closing
        the iterator early (aclose, cancellation) aborts the request. At the first `anext`, raises InvalidRequest if the
        request can never fit, QueueFull if the queue is full, EngineDead if the engine crashed and could not resume it,
        EngineLost if another engine can (at any `anext`, and only from an engine that is a replica of others).
        """
        ...

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests may name, in the order in which their names were first loaded."""
        ...

    async def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Checks the adapter in a folder or file against the model, and lets requests name it. It moves into memory
        when a request needs it. replace: a name that is loaded already gets this adapter; requests under way keep the
        old one. pinned: the adapter moves into memory now and stays there until it is unloaded.

        Raises InvalidRequest for a name in use or too many pinned adapters, ModelFileError or UnsupportedModel for an
        adapter that is damaged, does not fit the model, or needs what the executor lacks, EngineDead."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Takes no more requests that name the adapter; requests under way keep it. Raises ModelNotFound."""
        ...

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends one choice, or the whole request; no further delta is guaranteed. Unknown ids are ignored."""
        ...

    async def reset_prefix_cache(self) -> int:
        """Forgets all prefixes that are cached in the engine's memory, pinned ones too; the result of no request
        changes. Requests under way keep their blocks, and leave them in the cache when they end. Returns how many
        blocks became free. Raises EngineDead."""
        ...

    async def stats(self) -> EngineStats:
        """Fetches current statistics from the engine. Raises EngineDead."""
        ...

    async def look(self) -> Snapshot:
        """Fetches a detailed snapshot of the engine's present state. Raises EngineDead."""
        ...

    async def alive(self, timeout: float = 1.0) -> bool:
        """Whether the engine's loop responds within `timeout` seconds."""
        ...

    async def stop(self, drain: float = 0.0) -> None:
        """Takes no more requests, lets running requests finish for up to `drain` seconds, then ends them and itself."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a fleet knows of a replica. status: "ready", "starting", "trying" (requests that may have killed it),
    "silent", "draining", "refused" or "ended", for a reason. open: choices there. backlog: predicted seconds until it
    has computed the prompts that it was sent. routed: requests. lost: of these, that it died with; moved: that were
    moved away. predicted, hit: prompt tokens expected and found in its prefix cache. restarts: since the start. pid: of
    its process, 0 if unknown. blocks_used, blocks_cached, blocks_total: of its KV memory; cached ones are idle. role:
    of ModelInfo. running, waiting: choices by its last report. generated_tokens: by all processes that it had."""

    index: int
    status: str
    reason: str = ""
    open: int = 0
    backlog: float = 0.0
    routed: int = 0
    lost: int = 0
    moved: int = 0
    predicted: int = 0
    hit: int = 0
    restarts: int = 0
    pid: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    blocks_cached: int = 0
    role: str = ""
    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FleetScale:
    """How many replicas a fleet should have at present, and between which limits its load changes that."""

    target: int
    least: int
    most: int


@runtime_checkable
class Fleet(Protocol):
    """What an engine of several replicas offers besides the protocol of an engine; see fleet.operations."""

    @property
    def views(self) -> tuple[ReplicaView, ...]: ...

    @property
    def scaling(self) -> FleetScale | None: ...

    async def restart_replica(self, index: int, grace: float = 0.0) -> None: ...

    async def restart_all(self, grace: float = 0.0) -> None: ...

    async def scale(self, count: int, grace: float = 0.0) -> None: ...


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can give back its memory and take it again."""

    async def sleep(self, drain: float = 0.0) -> None:
        """Takes no more requests, lets running ones finish for up to `drain` seconds and ends the others with
        EngineAsleep; then frees the memory of weights and cache. All calls raise EngineAsleep until `wake_up`. Nothing
        happens if it is asleep. Raises EngineDead if it does not run."""
        ...

    async def wake_up(self) -> None:
        """Loads the model again; returns when the engine takes requests. Nothing happens if it is awake. Raises
        KvasirError if the model cannot be loaded; then the engine sleeps on."""
        ...


@runtime_checkable
class ShowsCache(Protocol):
    """An engine whose prefix cache can be followed."""

    def follow_cache(self, take: Callable[[CacheChanges], None]) -> None:
        """Calls `take` with a snapshot of the prefix cache as soon as there is one, then with each change. A new
        process begins with a new snapshot. Calling it again gives another snapshot."""
        ...


@runtime_checkable
class Exchanges(Protocol):
    """An engine of a host, whose clients can leave notes for each other."""

    @property
    def meeting(self) -> str:
        """Names the host, the same for all its clients; "" while there is no connection."""
        ...

    def exchange(self, note: bytes, take: Callable[[bytes], None]) -> None:
        """Leaves a note for the other clients, in place of the last one. Their notes come to `take` from then on; some
        may be lost, and some come several times."""
        ...


@runtime_checkable
class Launches(Protocol):
    """An engine that may begin its start before there is an event loop."""

    def launch(self) -> None:
        """Begins the start, for which `start` waits. Call `abandon` if `start` is not reached."""
        ...

    def abandon(self) -> None:
        """Ends what was launched and not started; anything else is left alone."""
        ...


@runtime_checkable
class Checks(Protocol):
    """An engine that can check itself."""

    async def check(self) -> None:
        """Checks that nothing leaked in the engine. Raises AssertionError."""
        ...
