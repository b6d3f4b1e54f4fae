"""The messages between RemoteEngine and EngineHost: msgpack of tagged structs in frames (frames.py).

client                           host
Hello   version, key        ->   Welcome, or a Fault of query 0 and the end
Submit  handle, request     ->   Steps ..., or a Fault of the handle
Abort, Pause  handle        ->
Ask     number, what        ->   Answer of the number, or a Fault of it
Beat                        <->  Beat with the engine's state

A client numbers its requests (handles, ascending) and its queries (from 1). Adapters is sent after Welcome and
whenever the adapters change.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec

from kvasir.engine.client import EngineState
from kvasir.engine.streams import is_plain
from kvasir.engine.wire import ErrorReport
from kvasir.kv.changes import CacheChanges
from kvasir.snapshot import Snapshot
from kvasir.statistics import EngineStats
from kvasir.types import AdapterInfo, Delta, ModelInfo, Request

VERSION = 3
HELLO_BYTES = 4096  # the longest first frame of a client
MAX_FRAME = 128 << 20  # bytes of any other
BEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0  # without a message, after which a peer counts as dead


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True, forbid_unknown_fields=True):
    pass


class Hello(_Message, frozen=True):
    """version: of this protocol."""

    version: int
    key: str = ""


class Welcome(_Message, frozen=True):
    """The host takes requests. `info.numerics` says with which other engines its results agree. instance: of the host;
    another process has another one."""

    info: ModelInfo
    summary: tuple[str, ...]
    instance: str


class Submit(_Message, frozen=True):
    """Submits a request. handle: names it on this connection; greater than all before."""

    handle: int
    request: Request


class Abort(_Message, frozen=True):
    """Ends choice `index` of a request, or all its choices (None)."""

    handle: int
    index: int | None


class Pause(_Message, frozen=True):
    """Pauses a request, or resumes it (`whether` False)."""

    handle: int
    whether: bool


class Ask(_Message, frozen=True):
    """A query: "stats", "look", "pulse", "reset_prefix_cache" or "wake_up"."""

    number: int
    what: str


class Sleep(_Message, frozen=True):
    """See `Sleeps.sleep`. The engine sleeps for all clients."""

    number: int
    drain: float


class LoadAdapter(_Message, frozen=True):
    """See `Engine.load_adapter`. The path is the host's."""

    number: int
    name: str
    path: str
    replace: bool
    pinned: bool


class UnloadAdapter(_Message, frozen=True):
    """See `Engine.unload_adapter`."""

    number: int
    name: str


class FollowCache(_Message, frozen=True):
    """Asks for a snapshot of the prefix cache, and for its changes from then on. Changes are left out while the client
    does not read; the gap in their numbers shows that."""


class CacheReport(_Message, frozen=True):
    """A snapshot of the prefix cache, or what has changed in it."""

    changes: CacheChanges


class LeaveNote(_Message, frozen=True):
    """A note for the host's other clients that leave notes. From then on their notes come, too."""

    note: bytes


class NoteLeft(_Message, frozen=True):
    """The note of another client. Notes are left out while the client does not read."""

    note: bytes


class Columns(_Message, frozen=True):
    """One token for each of many choices, and nothing else. tokens: packed int32. at: as in a Delta."""

    handles: list[int]
    indexes: list[int]
    tokens: bytes
    at: float


class One(_Message, frozen=True):
    """A delta of the request with this handle; its own id means nothing."""

    handle: int
    delta: Delta


class Steps(_Message, frozen=True):
    """Results of one step, or of several if the client was late. Those of each choice are in order."""

    parts: list[Columns | One]


class Fault(_Message, frozen=True):
    """What a request (handle) or a query (number) raises; the other is 0."""

    handle: int
    number: int
    error: ErrorReport


class Answer(_Message, frozen=True):
    """The reply to the query of this number."""

    number: int
    stats: EngineStats | None = None
    snapshot: Snapshot | None = None
    alive: bool = False
    adapter: AdapterInfo | None = None
    freed: int = 0


class AdapterList(_Message, frozen=True):
    """All adapters that requests may name."""

    adapters: tuple[AdapterInfo, ...]


class Beat(_Message, frozen=True):
    """A sign of life. From a host, with the state of its engine."""

    state: EngineState | None = None
    ended: bool = False


FromClient = Submit | Abort | Pause | FollowCache | LeaveNote | Ask | Sleep | LoadAdapter | UnloadAdapter | Beat
FromHost = Welcome | Steps | CacheReport | NoteLeft | Fault | Answer | AdapterList | Beat

encode = msgspec.msgpack.Encoder().encode
from_client = msgspec.msgpack.Decoder(FromClient)
from_host = msgspec.msgpack.Decoder(FromHost)
hello = msgspec.msgpack.Decoder(Hello)


class Outbox:
    """Results that were not sent yet. Tokens of a step share one Columns, since each is of another choice."""

    def __init__(self) -> None:
        self._parts: list[Columns | One] = []
        self._handles: list[int] = []
        self._indexes: list[int] = []
        self._tokens: list[int] = []
        self._at = 0.0

    def __bool__(self) -> bool:
        return bool(self._parts or self._handles)

    def add(self, handle: int, delta: Delta) -> None:
        """Adds a delta of a request."""
        if not is_plain(delta):
            if self._at != delta.at or not delta.at:
                self._close()
            self._parts.append(One(handle, delta))
            return
        if delta.at != self._at:
            self._close()
            self._at = delta.at
        self._handles.append(handle)
        self._indexes.append(delta.index)
        self._tokens.append(delta.token_ids[0])

    def _close(self) -> None:
        """Ends the open columns."""
        if self._handles:
            tokens = array("i", self._tokens).tobytes()
            self._parts.append(Columns(self._handles, self._indexes, tokens, self._at))
            self._handles, self._indexes, self._tokens = [], [], []

    def take(self) -> Steps:
        """All that was added, which is then gone from here."""
        self._close()
        parts, self._parts = self._parts, []
        return Steps(parts)


def deltas(steps: Steps, ids: Mapping[int, str]) -> Iterator[Delta]:
    """The results of the requests with these ids, by handle; others are left out. Raises ValueError for columns of
    unequal lengths."""
    for part in steps.parts:
        if isinstance(part, One):
            if part.handle in ids:
                yield replace(part.delta, id=ids[part.handle])
            continue
        tokens = array("i", part.tokens)
        for handle, index, token in zip(part.handles, part.indexes, tokens, strict=True):
            if handle in ids:
                yield Delta(ids[handle], index, (token,), at=part.at)
