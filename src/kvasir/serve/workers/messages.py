"""The messages between an API worker and the main process, on a Unix socket; both are processes of one server.

A connection begins with Link, for one of each worker, or with Head, for each HTTP request that the main process serves.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvasir.adapters import AdapterOption
from kvasir.engine.wire import ErrorReport
from kvasir.serve.auth.buckets import Bucket
from kvasir.serve.telemetry.reports import WorkerReport, dec_hook, enc_hook
from kvasir.types import AdapterInfo

MAX_FRAME = 64 << 20  # bytes
CHUNK = 1 << 16  # bytes of a body in one frame

Buckets = tuple[Bucket | None, Bucket | None]  # of requests and of tokens


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    pass


class Link(_Message, frozen=True):
    """A worker's first message. number: which of the workers it is."""

    number: int


class Serving(_Message, frozen=True):
    """The worker accepts connections."""


class Alive(_Message, frozen=True):
    """The worker's event loop runs; `report` so far."""

    report: WorkerReport


class OpenPlace(_Message, frozen=True):
    """Asks for a place among a key's open requests."""

    number: int
    key: str


class ClosePlace(_Message, frozen=True):
    """Gives back a place."""

    key: str


class Prompt(_Message, frozen=True):
    """Asks for tokens of a prompt."""

    number: int
    key: str
    tokens: int


class Generated(_Message, frozen=True):
    """Tokens that were generated for a key."""

    key: str
    tokens: int


class LoadOption(_Message, frozen=True):
    """Asks for an adapter to be loaded."""

    number: int
    option: AdapterOption
    replacing: bool


class UnloadName(_Message, frozen=True):
    """Asks for an adapter to be unloaded."""

    number: int
    name: str


class Learnt(_Message, frozen=True):
    """The worker has the adapters of this version."""

    version: int


class Reported(_Message, frozen=True):
    """The reply to AskReport."""

    number: int
    report: WorkerReport


class Granted(_Message, frozen=True):
    """The reply to OpenPlace and Prompt; to LoadOption and UnloadName, with the adapter."""

    number: int
    buckets: Buckets = (None, None)
    adapter: AdapterInfo | None = None


class Refused(_Message, frozen=True):
    """The reply to any query: what it raises."""

    number: int
    error: ErrorReport
    buckets: Buckets = (None, None)


class ShelfState(_Message, frozen=True):
    """The adapters, their options, and the scales of those that requests get which select none (defaults), or that all
    get (always). version: grows."""

    version: int
    known: tuple[AdapterInfo, ...]
    options: dict[str, AdapterOption]
    defaults: dict[str, float]
    always: dict[str, float]


class AskReport(_Message, frozen=True):
    """Asks for the worker's report."""

    number: int


class AbortNamed(_Message, frozen=True):
    """Aborts the worker's requests of this name, or all (None)."""

    number: int
    name: str | None


class Aborted(_Message, frozen=True):
    """The reply to AbortNamed. count: requests."""

    number: int
    count: int


class Head(_Message, frozen=True):
    """An HTTP request up to its body, as in its ASGI scope."""

    scope: dict[str, Any]
    headers: list[tuple[bytes, bytes]]


class Body(_Message, frozen=True):
    """A part of a body. more: further parts follow."""

    data: bytes
    more: bool


class Start(_Message, frozen=True):
    """The head of a response."""

    status: int
    headers: list[tuple[bytes, bytes]]


_Asked = OpenPlace | ClosePlace | Prompt | Generated | LoadOption | UnloadName
ToMain = Link | Serving | Alive | _Asked | Learnt | Reported | Aborted
ToWorker = Granted | Refused | ShelfState | AskReport | AbortNamed

encode = msgspec.msgpack.Encoder(enc_hook=enc_hook).encode
first = msgspec.msgpack.Decoder(Link | Head)
to_main = msgspec.msgpack.Decoder(ToMain, dec_hook=dec_hook)
to_worker = msgspec.msgpack.Decoder(ToWorker)
request_part = msgspec.msgpack.Decoder(Body)
response_part = msgspec.msgpack.Decoder(Start | Body)
