"""The messages between the API process and the engine process: msgpack of tagged structs, one message per step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvasir.config import EngineOptions
from kvasir.errors import (
    ConfigError,
    DeadlineExceeded,
    DeviceFault,
    EngineAsleep,
    EngineDead,
    EngineLost,
    InvalidRequest,
    KvasirError,
    LimitExceeded,
    ModelFileError,
    ModelNotFound,
    PromptTooLong,
    QueueFull,
    RequestAborted,
    TextTooLong,
    UnsupportedModel,
)
from kvasir.kv.changes import CacheChanges
from kvasir.snapshot import Snapshot
from kvasir.statistics import EngineStats
from kvasir.types import AdapterInfo, Delta, ModelInfo, Request, Tokens, each_delta

AHEAD = 32  # messages that each side may buffer while the API process is slow; then the engine waits for it


class WorkerSpec(msgspec.Struct, frozen=True):
    """What an engine process runs: a model by `options`, or the FakeRunner with options of its own (`fake`).
    processors: ids of those that it may use, () for all."""

    options: EngineOptions | None = None
    fake: dict | None = None
    processors: tuple[int, ...] = ()


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    pass


class Add(_Message, frozen=True):
    """Submits a request."""

    request: Request


class Abort(_Message, frozen=True):
    """Ends choice `index` of a request, or all its choices (None)."""

    id: str
    index: int | None


class Pause(_Message, frozen=True):
    """Pauses a request, or resumes it (`whether` False)."""

    id: str
    whether: bool


class EngineQuery(_Message, frozen=True):
    """A numbered query: "stats", "look", "check", "pulse" or "reset_prefix_cache"."""

    number: int
    what: str


class ReadAdapter(_Message, frozen=True):
    """Asks for a description of the adapter at a path; the reply of this number has it, or a fault."""

    number: int
    path: str


class PinAdapter(_Message, frozen=True):
    """Moves an adapter into memory, where it stays."""

    adapter: AdapterInfo


class DropAdapter(_Message, frozen=True):
    """The adapter of this content hash has lost its name: it is not pinned any more, and leaves the memory."""

    content: str


class FollowCache(_Message, frozen=True):
    """Asks for a snapshot of the prefix cache, and for all its changes from then on. contents: with the contents of
    blocks."""

    contents: bool = False


class Stop(_Message, frozen=True):
    """Asks the engine to stop."""

    pass


class Ready(_Message, frozen=True):
    """The engine takes requests."""

    info: ModelInfo
    summary: tuple[str, ...]


class ErrorReport(_Message, frozen=True):
    """A KvasirError by its class name. `id`: of the request it concerns, "" for the start of the engine."""

    id: str
    kind: str
    message: str
    hint: str
    param: str | None = None
    retry_after: float | None = 1.0
    tokens: int = 0
    context: int = 0
    deaths: int | None = None
    lives: int | None = None


class Deltas(_Message, frozen=True):
    """The results of a step; each choice is in one of the two lists."""

    deltas: list[Delta]
    tokens: list[Tokens] = []

    @classmethod
    def of(cls, added: Iterable[Delta | Tokens]) -> Deltas:
        """The message for the results of a step."""
        deltas: list[Delta] = []
        tokens: list[Tokens] = []
        for part in added:
            tokens.append(part) if isinstance(part, Tokens) else deltas.append(part)
        return cls(deltas, tokens)

    def each(self) -> list[Delta]:
        """The results as one Delta for each choice."""
        return [*each_delta(self.tokens), *self.deltas]


class Aborted(_Message, frozen=True):
    """The reply to an Abort: what follows about this id is about a later request."""

    id: str


class Reply(_Message, frozen=True):
    """The reply to the query of this number."""

    number: int
    stats: EngineStats | None = None
    error: str | None = None
    snapshot: Snapshot | None = None
    longest_step: float = 0.0  # seconds, among the recorded steps
    freed: int = 0  # blocks
    adapter: AdapterInfo | None = None
    fault: ErrorReport | None = None


class CacheReport(_Message, frozen=True):
    """A snapshot of the prefix cache, or what has changed in it."""

    changes: CacheChanges


class Progress(_Message, frozen=True):
    """Progress of the start: `done` of `total` bytes of weights are loaded or, then, kernels are compiled."""

    done: int
    total: int
    kernels: bool = False


Command = Add | Abort | Pause | FollowCache | EngineQuery | ReadAdapter | PinAdapter | DropAdapter | Stop
Event = Ready | ErrorReport | Deltas | Aborted | Reply | CacheReport | Progress

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode

# The fields of each class besides message and hint; an error of any other class is sent as its nearest base class.
_KINDS: dict[type[KvasirError], tuple[str, ...]] = {
    KvasirError: (),
    InvalidRequest: ("param",),
    PromptTooLong: ("param", "tokens", "context"),
    TextTooLong: ("param", "tokens", "context"),
    ModelNotFound: ("param",),
    QueueFull: ("retry_after",),
    LimitExceeded: ("retry_after",),
    DeadlineExceeded: (),
    RequestAborted: (),
    ModelFileError: (),
    UnsupportedModel: (),
    ConfigError: (),
    EngineAsleep: (),
    EngineDead: (),
    EngineLost: ("deaths", "lives"),
    DeviceFault: (),
}
_BY_NAME = {cls.__name__: cls for cls in _KINDS}


def to_fault(request_id: str, error: KvasirError) -> ErrorReport:
    """The message for an error of a request, or of a query ("")."""
    cls = next(c for c in type(error).__mro__ if c in _KINDS)
    own = {name: getattr(error, name) for name in _KINDS[cls]}
    return ErrorReport(request_id, cls.__name__, error.message, error.hint, **own)


def to_error(fault: ErrorReport) -> KvasirError:
    """The error that a message describes."""
    cls = _BY_NAME.get(fault.kind, KvasirError)
    own: dict[str, Any] = {name: getattr(fault, name) for name in _KINDS[cls]}
    return cls(fault.message, fault.hint, **own)
