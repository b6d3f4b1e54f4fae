"""Errors a user can act on: what was wrong, what was expected, what to do.

Messages quote values that come from clients and files. `quoted` shows such a value in few, printable characters; every
error bounds its own text too, so that a message never carries a hostile value to a terminal, a log or a client.
"""

from __future__ import annotations

import reprlib

MAX_QUOTED = 200  # characters of one foreign value
MAX_MESSAGE = 1000  # of a message, and of a hint
_MAX_BITS = 1024  # of an integer whose digits are worth reading


def quoted(value: object, most: int = MAX_QUOTED) -> str:
    """A foreign value as `repr` shows it, in at most `most` printable characters. Cheap for values of any size."""
    return bounded(_QUOTE.repr(value), most)


def bounded(text: str, most: int = MAX_MESSAGE) -> str:
    """`text` in at most `most` characters: what is not printable is escaped, and a long middle is left out."""
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
        bits = x.bit_length()  # Python refuses to write numbers of more than 4300 digits
        return super().repr_int(x, level) if bits <= _MAX_BITS else f"an integer of {bits} bits"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: self.maxstring])


_QUOTE = _Quote()


class KvasirError(Exception):
    """Base of all errors meant for users. `hint` says what to do next, `usual_hint` where an error brings none of its
    own. Both are bounded."""

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
    """A prompt that does not fit into the context. tokens: of the prompt. context: the tokens that it holds."""

    def __init__(self, message: str, hint: str = "", param: str | None = None, *, tokens: int, context: int):
        super().__init__(message, hint, param)
        self.tokens = tokens
        self.context = context


class TextTooLong(PromptTooLong):
    """A text that cannot fit into the context, whatever its tokens are: it was not tokenized to its end. tokens: the
    fewest that it can have."""


class ModelNotFound(InvalidRequest):
    """A request names a model that there is not: HTTP 404."""


class QueueFull(KvasirError):
    """The waiting queue is at its bound: HTTP 429 with `Retry-After: retry_after` seconds."""

    def __init__(self, message: str, hint: str = "", retry_after: float = 1.0):
        super().__init__(message, hint)
        self.retry_after = retry_after


class LimitExceeded(KvasirError):
    """A key is at one of its limits: HTTP 429; `retry_after` in seconds, None when waiting would not help."""

    def __init__(self, message: str, hint: str = "", retry_after: float | None = None):
        super().__init__(message, hint)
        self.retry_after = retry_after


class DeadlineExceeded(KvasirError):
    """The request's own deadline passed before its answer was complete: HTTP 408."""


class ModelFileError(KvasirError, ValueError):
    """A model file is malformed, truncated, hostile, or of a kind that cannot be read."""

    usual_hint = "the file is damaged or does not belong to this model: download the model again"


class UnsupportedModel(KvasirError, ValueError):
    """An architecture, tokenizer or feature of a model that this engine does not have."""

    usual_hint = "choose a model without it; docs/howto/add-a-model.md shows what is supported"


class TemplateError(InvalidRequest):
    """A chat template refused the conversation, failed, or exceeded its time or output limit."""


class TemplateLimit(TemplateError):
    """A template passed its limit of time, memory or output, or ended its process."""


class TemplateTooLong(TemplateLimit):
    """A template wrote more than `size` characters, the most that it may."""

    def __init__(self, size: int):
        super().__init__(f"the chat template wrote more than {size} characters", "shorten the conversation", "messages")
        self.size = size


class ConfigError(KvasirError, ValueError):
    """An option has a value that cannot work on this machine or with this model."""


class EngineDead(KvasirError):
    """The engine process ended while this request ran and it could not be resumed: HTTP 503."""
