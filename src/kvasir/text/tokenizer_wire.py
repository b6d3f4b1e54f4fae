"""The messages between a tokenizer's processes and their parent: msgpack in the frames of sandbox.py."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvasir.errors import InvalidRequest, KvasirError, ModelFileError, UnsupportedModel
from kvasir.text.encoder import Texts
from kvasir.text.table import Table

_ERRORS = {kind.__name__: kind for kind in (InvalidRequest, ModelFileError, UnsupportedModel)}
MAX_MESSAGE_CHARS = 1000


class Job(msgspec.Struct, tag=True, frozen=True):
    """seconds: of processor time, after which the worker ends itself."""

    seconds: float


class LoadFolder(Job, frozen=True):
    folder: str


class LoadGGUF(Job, frozen=True):
    metadata: dict[str, Any]


class Fork(Job, frozen=True):
    """A socket is passed with it, from which the new process reads its jobs."""


class Kill(Job, frozen=True):
    pid: int


class Encode(Job, frozen=True):
    what: Texts


class Spell(Job, frozen=True):
    hidden: Mapping[str, int]
    texts: Sequence[str]


AnyJob = LoadFolder | LoadGGUF | Fork | Kill | Encode | Spell


class Failure(msgspec.Struct, tag=True, frozen=True):
    kind: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, KvasirError):
            return cls(type(error).__name__, error.message[:MAX_MESSAGE_CHARS], error.hint[:MAX_MESSAGE_CHARS])
        return cls("", f"the tokenizer failed ({type(error).__name__}: {error})"[:MAX_MESSAGE_CHARS])

    def error(self) -> KvasirError:
        return _ERRORS.get(self.kind, ModelFileError)(self.message, self.hint)


class Loaded(msgspec.Struct, tag=True, frozen=True):
    table: Table


class Forked(msgspec.Struct, tag=True, frozen=True):
    pid: int


class Ended(msgspec.Struct, tag=True, frozen=True):
    """signal: what ended a copy."""

    signal: int


class Ids(msgspec.Struct, tag=True, frozen=True):
    """ids: the ids of each text, as little-endian u32."""

    ids: list[bytes]

    @classmethod
    def of(cls, many: Sequence[Sequence[int]]) -> Ids:
        return cls([array("I", ids).tobytes() for ids in many])

    def lists(self) -> list[list[int]]:
        return [array("I", ids).tolist() for ids in self.ids]


AnyReply = Failure | Loaded | Forked | Ended | Ids

_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: value.tolist())  # for numpy arrays and scalars
_jobs = msgspec.msgpack.Decoder(AnyJob)
_replies = msgspec.msgpack.Decoder(AnyReply)


def encode(message: Job | msgspec.Struct) -> bytes:
    """Raises ModelFileError for metadata with values that no file can contain."""
    try:
        return _encoder.encode(message)
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ModelFileError(f"the tokenizer's metadata are not plain values: {error}") from error


def decode_job(data: bytes | bytearray) -> AnyJob:
    return _jobs.decode(data)


def decode_reply(data: bytes | bytearray) -> Any:
    """A message of AnyReply. Raises ModelFileError for a malformed reply."""
    try:
        return _replies.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ModelFileError(f"the tokenizer's process gave a malformed reply: {error}") from error
