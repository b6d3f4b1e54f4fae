"""Traces of HTTP requests: from the server's span to each step of the engine.

POST /v1/chat/completions          from the first byte to the last
  request                          in the engine, or in a fleet
    replica 1                      only in a fleet, each time that a replica is chosen
      queue, prefill, decode ...   a step each
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.engine.meter import RequestWatch
from kvasir.serve.http.asgi import LEFT, Sent, header
from kvasir.serve.telemetry.metrics import method_of, route_of
from kvasir.serve.telemetry.otlp import SpanExporter
from kvasir.serve.telemetry.spans import SERVER, Span, TraceContext, spans_of


@dataclass(slots=True)
class _Traced:
    """The HTTP request being served."""

    context: TraceContext
    root: Span
    spans: list[Span] = field(default_factory=list)


_current: ContextVar[_Traced | None] = ContextVar("traced", default=None)


def note(model: str, watch: RequestWatch) -> None:
    """Adds an ended request of the core to the trace of the HTTP request that it belongs to."""
    if (traced := _current.get()) is None or not watch.trace:
        return
    now = time.time()
    span = Span("request", traced.root.id, now - (time.monotonic() - watch.begun), now)
    span.facts = {
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": watch.prompt_tokens,
        "gen_ai.usage.output_tokens": watch.answer_tokens,
        "kvasir.cached_tokens": watch.cached_tokens,
        "gen_ai.response.finish_reasons": ",".join(sorted(watch.reasons)),
    }
    span.failed = "error" in watch.reasons
    traced.spans += (*spans_of(watch.notes, span), span)


class Traced:
    """ASGI middleware. Sets `state["trace_id"]` for logs, and `state["traceparent"]` if the request is traced: if its
    caller traces it, or, without a caller's traceparent, for this share of all requests (`ratio`)."""

    def __init__(self, app: ASGIApp, exporter: SpanExporter | None, ratio: float = 1.0):
        """exporter: None if nothing is traced; logs still carry the caller's trace id."""
        self.app = app
        self.exporter = exporter
        self.ratio = ratio

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        context = TraceContext.of(header(scope, b"traceparent"), header(scope, b"tracestate"))
        state: dict[str, Any] = scope.setdefault("state", {})
        if context is None and self.exporter is not None:
            context = TraceContext.new(self.ratio)
        if context is None:
            return await self.app(scope, receive, send)
        state["trace_id"] = context.trace
        if self.exporter is None or not context.sampled:
            return await self.app(scope, receive, send)
        traced = _Traced(context, Span("", context.parent, time.time(), kind=SERVER))
        state["traceparent"] = context.header(traced.root.id)
        sent, token = Sent(send), _current.set(traced)
        try:
            await self.app(scope, receive, sent)
        finally:
            _current.reset(token)
            _end(traced.root, scope, sent.status or LEFT)
            self.exporter.put(context, [traced.root, *traced.spans])


def _end(root: Span, scope: Scope, status: int) -> None:
    """Ends the server's span. Names: https://opentelemetry.io/docs/specs/semconv/http/http-spans/"""
    state = scope.get("state", {})
    method, route, key = method_of(scope), route_of(scope), state.get("key")
    root.name, root.end, root.failed = f"{method} {route}", time.time(), status >= 500
    root.facts = {
        "http.request.method": method,
        "http.route": route,
        "http.response.status_code": status,
        "kvasir.request_id": state.get("request_id"),
        "kvasir.key": key.name if key else None,
    }
