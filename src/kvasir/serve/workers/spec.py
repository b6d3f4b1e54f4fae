"""What an API worker is told at its start, as a line of JSON on its standard input."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvasir.engine.remote import HostAddress, RemoteEngine
from kvasir.serve.settings import ServeSettings
from kvasir.store.entry import ModelEntry

T = TypeVar("T")

MAX_WORKERS = 64


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker is told at its start. settings: of the whole server. listener: descriptor of its socket. created:
    when the server began to serve its model."""

    number: int
    count: int
    listener: int
    engine: str
    main: str
    created: int
    settings: ServeSettings
    entry: ModelEntry | None = None

    def remote_engine(self) -> RemoteEngine:
        """The main process's engine. It ends with the main process."""
        return RemoteEngine(HostAddress(Path(self.engine)), lasts=False)


def encode(spec: Any) -> bytes:
    """A spec as a line."""
    return msgspec.json.encode(spec, enc_hook=_text_of)


def decode(line: bytes, kind: type[T]) -> T:
    """The spec of a line. Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=kind, dec_hook=lambda type_, value: type_(value))


def _text_of(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in a spec")
