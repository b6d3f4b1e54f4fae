"""The access log: one line for each request. It records timing and token counts, never the content."""

from __future__ import annotations

import time
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.engine.meter import RequestWatch
from kvasir.serve.auth.keys import Key
from kvasir.serve.http.asgi import LEFT, Sent
from kvasir.serve.telemetry.lines import LineLog
from kvasir.serve.telemetry.metrics import method_of, route_of


@dataclass(slots=True)
class Spent:
    """What the core computed for one HTTP request. reasons: number of its choices by finish reason."""

    model: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


# Usage of the HTTP request being served; its tasks share the object.
_spent: ContextVar[Spent | None] = ContextVar("spent", default=None)


def note(model: str, watch: RequestWatch) -> None:
    """Adds an ended request of the core to the HTTP request that it belongs to."""
    spent = _spent.get()
    if spent is None:
        return
    spent.model = model
    spent.prompt_tokens += watch.prompt_tokens
    spent.cached_tokens += watch.cached_tokens
    spent.answer_tokens += watch.answer_tokens
    spent.reasons += watch.reasons


class AccessLog:
    """ASGI middleware around everything that can respond."""

    def __init__(self, app: ASGIApp, log: LineLog):
        self.app = app
        self.log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun, spent, sent = time.perf_counter(), Spent(), Sent(send)
        token = _spent.set(spent)
        try:
            await self.app(scope, receive, sent)
        finally:
            _spent.reset(token)
            seconds = round(time.perf_counter() - begun, 6)
            line = {**identity(scope), "route": route_of(scope), "status": sent.status or LEFT, "seconds": seconds}
            self.log.put({**line, **_usage(spent)})


def identity(scope: Scope) -> dict[str, Any]:
    """The fields that identify a request: time, request id, trace id if it has one, key, client address and method."""
    state: dict[str, Any] = scope.get("state", {})
    key: Key | None = state.get("key")
    trace = {"trace_id": state["trace_id"]} if "trace_id" in state else {}
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request_id": state.get("request_id"),
        **trace,
        "key": key.name if key else None,
        "client": (scope.get("client") or (None,))[0],
        "method": method_of(scope),
    }


def _usage(spent: Spent) -> dict[str, Any]:
    if spent.model is None:
        return {}
    return {
        "model": spent.model,
        "prompt_tokens": spent.prompt_tokens,
        "cached_tokens": spent.cached_tokens,
        "answer_tokens": spent.answer_tokens,
        "finish_reasons": spent.reasons,
    }
