"""Errors that a user can act on: what was wrong, what was expected, what to do.

Messages quote values from clients and files. `quoted` shows such a value in few, printable characters; every error also
bounds its own text, so that a message never carries a hostile value to a terminal, a log or a client.
"""

from __future__ import annotations

import reprlib

MAX_QUOTED = 200  # characters of one quoted value
MAX_MESSAGE = 1000  # characters of a message, and of a hint
_MAX_BITS = 1024  # of an integer that is quoted in digits


def quoted(value: object, most: int = MAX_QUOTED) -> str:
    """A value as `repr` shows it, in at most `most` printable characters. Cheap for values of any size."""
    return bounded(_QUOTE.repr(value), most)


def bounded(text: str, most: int = MAX_MESSAGE) -> str:
    """`text` in at most `most` characters: unprintable characters are escaped, and a long middle is left out."""
    text = _cut(text, most)
    if not text.isprintable():
        text = _cut("".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text), most)
    return text


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    gap = f" ... [{len(text)} characters] ... "
    room = most - len(gap)
    tail = room // 4
    return text[: room - tail] + gap + text[len(text) - tail :]


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class _Quote(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = self.maxother = self.maxlong = MAX_QUOTED

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()  # Python refuses to print integers of more than 4300 digits
        return super().repr_int(x, level) if bits <= _MAX_BITS else f"an integer of {bits} bits"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: self.maxstring])


_QUOTE = _Quote()


class KvasirError(Exception):
    """Base of all errors meant for users. `hint`: what to do next; `usual_hint` replaces an empty hint. Both are
    bounded."""

    usual_hint = ""

    def __init__(self, message: str, hint: str = ""):
        self.message = bounded(message)
        self.hint = bounded(hint or self.usual_hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(KvasirError, ValueError):
    """A request that cannot be served as asked: HTTP 400. `param` names the offending field."""

    def __init__(self, message: str, hint: str = "", param: str | None = None):
        super().__init__(message, hint)
        self.param = param if param is None else bounded(param, MAX_QUOTED)


class PromptTooLong(InvalidRequest):
    """A prompt that does not fit into the context. tokens: of the prompt. context: its size in tokens."""

    def __init__(self, message: str, hint: str = "", param: str | None = None, *, tokens: int, context: int):
        super().__init__(message, hint, param)
        self.tokens = tokens
        self.context = context


class TextTooLong(PromptTooLong):
    """A text that cannot fit into the context, whatever its tokens are: it was not tokenized completely. tokens: a
    lower bound."""


class ModelNotFound(InvalidRequest):
    """A request names an unknown model: HTTP 404."""


class QueueFull(KvasirError):
    """The waiting queue is full: HTTP 429 with `Retry-After: retry_after` seconds."""

    def __init__(self, message: str, hint: str = "", retry_after: float = 1.0):
        super().__init__(message, hint)
        self.retry_after = retry_after


class LimitExceeded(KvasirError):
    """A key is at one of its limits: HTTP 429; `retry_after` in seconds, None if waiting would not help."""

    def __init__(self, message: str, hint: str = "", retry_after: float | None = None):
        super().__init__(message, hint)
        self.retry_after = retry_after


class DeadlineExceeded(KvasirError):
    """The request's deadline passed before its choices were complete: HTTP 408."""


class RequestAborted(KvasirError):
    """The request was aborted on the server, not by its client: HTTP 499."""


class ModelFileError(KvasirError, ValueError):
    """A model file is malformed, truncated, hostile, or of an unknown kind."""

    usual_hint = "the file is damaged or does not belong to this model: download the model again"


class UnsupportedModel(KvasirError, ValueError):
    """A model's architecture, tokenizer or feature that this engine does not support."""

    usual_hint = "choose a model without it; docs/howto/add-a-model.md shows what is supported"


class TemplateError(InvalidRequest):
    """A chat template refused the conversation, failed, or exceeded its time or output limit."""


class TemplateLimit(TemplateError):
    """A template exceeded its limit of time, memory or output, or ended its process."""


class TemplateTooLong(TemplateLimit):
    """A template wrote more than its limit of `size` characters."""

    def __init__(self, size: int):
        super().__init__(f"the chat template wrote more than {size} characters", "shorten the conversation", "messages")
        self.size = size


class ConfigError(KvasirError, ValueError):
    """An option's value cannot work on this machine or with this model."""


class EngineDead(KvasirError):
    """The engine process ended during the request, which could not be resumed: HTTP 503."""


class EngineAsleep(EngineDead):
    """The engine was put to sleep and holds no memory: HTTP 503."""


class EngineLost(EngineDead):
    """The engine has died, or cannot compute the request at present, and another engine can continue it. deaths, lives:
    of the request from now on, see types.Request; None if they are not known."""

    def __init__(self, message: str, hint: str = "", *, deaths: int | None = None, lives: int | None = None):
        super().__init__(message, hint)
        self.deaths = deaths
        self.lives = lives


class DeviceFault(KvasirError):
    """The device has failed: nothing that this process computes on it can be trusted any more. An engine process ends,
    and its supervisor starts another; an engine in the user's process dies."""
