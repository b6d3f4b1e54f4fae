"""Faults: what every exception becomes before a dialect encodes it in its own format."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvasir.errors import (
    MAX_MESSAGE,
    MAX_QUOTED,
    DeadlineExceeded,
    EngineAsleep,
    EngineDead,
    InvalidRequest,
    KvasirError,
    LimitExceeded,
    ModelNotFound,
    PromptTooLong,
    QueueFull,
    RequestAborted,
    TextTooLong,
    bounded,
)
from kvasir.serve.http.wire import Wire

log = logging.getLogger("kvasir.serve")

_LEAVE_OUT = "leave it out; a server with --ignore-unknown-fields lists such fields and serves the request"
_NO_ROUTE = {
    404: "there is no such route (/docs and /openapi.json list all)",
    405: "the route does not take this method (/docs and /openapi.json list those of each)",
}
_NAMES = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "too_large", 431: "too_large"}


# The state of the HTTP request being served; its tasks share it.
current: ContextVar[Mapping[str, Any]] = ContextVar("current", default={})  # noqa: B039 - nothing changes the default


def ids_for_logs() -> str:
    """The ids of the request being served, as the end of a log message."""
    state = current.get()
    found = [f"{what} {state[key]}" for what, key in (("request", "request_id"), ("trace", "trace_id")) if key in state]
    return f" ({', '.join(found)})" if found else ""


class NotFound(InvalidRequest):
    """A request names a stored object that does not exist, or belongs to another key."""


class ClassNotAllowed(InvalidRequest):
    """A request asks for a better service class than its key permits."""


class ThreadUnsupported(InvalidRequest):
    """A request of the Messages API asks the server to keep the conversation. Clients that support it fall back to
    sending the whole conversation."""

    code = "thread_unsupported_request"


class ScopeNeeded(KvasirError):
    """A key lacks the scope that the request needs."""


class CannotContinue(KvasirError):
    """A client names a place in a stream that this server cannot continue from."""


class AnswerFailed(KvasirError):
    """The engine failed on a choice."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An HTTP status and a message. `param` is the offending field, `code` a stable identifier for programs. The texts
    are bounded, since they quote what clients send.

    too_long: facts about a prompt that is too long; each dialect has a wording by which clients recognize it. details:
    fields by which Anthropic's clients decide what to do.
    """

    status: int
    message: str
    code: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    too_long: PromptTooLong | None = None
    details: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", bounded(self.message, 2 * MAX_MESSAGE))  # a message and its hint
        object.__setattr__(self, "param", self.param and bounded(self.param, MAX_QUOTED))
        object.__setattr__(self, "headers", {k: bounded(v, MAX_QUOTED) for k, v in self.headers.items()})


def fault_of(error: BaseException) -> Fault:
    """The fault of any exception. Unexpected exceptions are logged, and reported without internals."""
    match error:
        case ModelNotFound():
            return Fault(404, str(error), "model_not_found", "model")
        case NotFound():
            return Fault(404, str(error), "not_found", error.param)
        case ClassNotAllowed():
            return Fault(403, str(error), "class_not_allowed", error.param)
        case ScopeNeeded():
            return Fault(403, str(error), "scope_needed")
        case PromptTooLong():
            return Fault(400, str(error), "context_length_exceeded", error.param, too_long=error)
        case ThreadUnsupported():
            details = {"error_code": error.code, "unsupported": [error.param]}
            return Fault(400, str(error), error.code, error.param, details=details)
        case InvalidRequest():
            return Fault(400, str(error), "invalid_value", error.param)
        case QueueFull():
            return Fault(429, str(error), "queue_full", headers=_retry(error.retry_after))
        case LimitExceeded():
            return Fault(429, str(error), "rate_limit_exceeded", headers=_retry(error.retry_after))
        case DeadlineExceeded():
            return Fault(408, str(error), "deadline_exceeded", headers=_retry(None))
        case EngineAsleep():
            return Fault(503, str(error), "asleep", headers=_retry(None))
        case EngineDead():
            return Fault(503, str(error), "engine_unavailable", headers={"Retry-After": "5"})
        case RequestAborted():
            return Fault(499, str(error), "request_aborted", headers=_retry(None))
        case CannotContinue():
            return Fault(409, str(error), "cannot_continue")
        case AnswerFailed():
            return Fault(500, str(error), "engine_error")
        case RequestValidationError():
            return _of_validation(error)
        case HTTPException():
            code = _NAMES.get(error.status_code, "http_error")
            plain = error.detail == HTTPStatus(error.status_code).phrase
            message = _NO_ROUTE.get(error.status_code, error.detail) if plain else error.detail
            return Fault(error.status_code, str(message), code, headers=dict(error.headers or {}))
    log.error("a request failed%s", ids_for_logs(), exc_info=error)
    return Fault(500, "an internal server error; see the server's log", "internal_error")


def _retry(after: float | None) -> dict[str, str]:
    """Headers: when to retry, in whole seconds, or that clients shall not retry automatically."""
    return {"x-should-retry": "false"} if after is None else {"Retry-After": str(max(1, math.ceil(after)))}


def _of_validation(error: RequestValidationError) -> Fault:
    """The first error of a body. Among the branches of a union, the error with the longest location."""
    wrong = max(error.errors(), key=lambda e: len(e["loc"]), default=None)
    if wrong is None:
        return Fault(400, "the body is malformed", "invalid_body")
    first, *rest = wrong["loc"] or ("body",)
    parts = rest if first in ("body", "query", "path") else (first, *rest)
    param = ".".join(str(p) for p in parts if _is_field(p)) or None
    if wrong["type"] == "json_invalid":
        return Fault(400, f"the body is not valid JSON: {wrong['ctx']['error']}", "invalid_json")
    if wrong["type"] == "extra_forbidden":
        return Fault(400, f"unrecognized field: {param} ({_LEAVE_OUT})", "unknown_field", param)
    if wrong["type"] == "missing":
        return Fault(400, f"missing field: {param or 'the JSON body'}", "missing_field", param)
    return Fault(400, f"{param or 'the body'}: {wrong['msg']}", "invalid_value", param)


def _is_field(part: str | int) -> bool:
    """Whether a part of an error's location is a field or an index, and not the type that was tried."""
    return isinstance(part, int) or ("[" not in part and part != "str" and part not in _objects())


@cache
def _objects() -> frozenset[str]:
    """The names of all wire types."""
    found, new = set[type[Wire]](), [Wire]
    while new:
        kind = new.pop()
        found.add(kind)
        new += kind.__subclasses__()
    return frozenset(kind.__name__ for kind in found)


def token_count(long: PromptTooLong) -> str:
    """The tokens of a prompt that is too long, as far as they were counted."""
    return f"at least {long.tokens}" if isinstance(long, TextTooLong) else str(long.tokens)


def with_field(fault: Fault) -> str:
    """The message, with the field's name where the format has no separate place for it."""
    named = not fault.param or fault.param in fault.message
    return fault.message if named else f"{fault.param}: {fault.message}"
