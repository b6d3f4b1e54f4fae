"""SpanExporter: sends spans to an OpenTelemetry collector, from its own thread.

Format: https://opentelemetry.io/docs/specs/otlp/ (OTLP/HTTP with JSON, port 4318 by convention)
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import queue
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvasir import __version__
from kvasir.serve.http.networks import check_endpoint
from kvasir.serve.telemetry.spans import Span, TraceContext

log = logging.getLogger("kvasir.serve")

MOST = 4096  # traces in the queue
AT_ONCE = 64  # traces in a message
PAUSE = 1.0  # seconds for which more are waited for
TIMEOUT = 5.0  # seconds for a message
END_SECONDS = 3.0  # for which `close` waits
COMPLAIN = 60.0  # seconds between two lines about failures


class SpanExporter:
    """outcomes: counts spans as "sent" or "dropped". service: the name in the traces."""

    def __init__(self, url: str, service: str = "kvasir", outcomes: Counter[str] | None = None):
        """url: of the collector; its path is /v1/traces unless one is given. Raises ConfigError."""
        check_endpoint(url)
        self._parts = urlsplit(url)
        self._path = self._parts.path if self._parts.path.strip("/") else "/v1/traces"
        self._resource = {"service.name": service, "service.version": __version__, "process.pid": os.getpid()}
        self.outcomes = Counter[str]() if outcomes is None else outcomes
        self._queue: queue.Queue[tuple[TraceContext, Sequence[Span]] | None] = queue.Queue(MOST)
        self._complained = -COMPLAIN
        self._link: http.client.HTTPConnection | None = None
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, context: TraceContext, spans: Sequence[Span]) -> None:
        """Queues spans of a trace; never blocks."""
        try:
            self._queue.put_nowait((context, spans))
        except queue.Full:
            self.outcomes["dropped"] += len(spans)

    def close(self) -> None:
        """Sends what is queued, if that takes at most a few seconds. Blocks."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=END_SECONDS)
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        more = True
        while more:
            traces = [self._queue.get()]
            deadline = time.monotonic() + PAUSE
            while traces[-1] is not None and len(traces) < AT_ONCE:
                try:
                    traces.append(self._queue.get(timeout=max(0.0, deadline - time.monotonic())))
                except queue.Empty:
                    break
            more = traces[-1] is not None
            self._send([trace for trace in traces if trace is not None])
        self._forget_link()

    def _send(self, traces: list[tuple[TraceContext, Sequence[Span]]]) -> None:
        spans = [span_object(context, span) for context, some in traces for span in some]
        if not spans:
            return
        try:
            self._post(msgspec.json.encode(self._message(spans)))
            self.outcomes["sent"] += len(spans)
        except (OSError, http.client.HTTPException) as error:
            self._forget_link()
            self.outcomes["dropped"] += len(spans)
            if time.monotonic() - self._complained >= COMPLAIN:
                self._complained = time.monotonic()
                log.warning("the collector at %s takes no traces: %s", self._parts.netloc, error)

    def _message(self, spans: list[dict[str, Any]]) -> dict[str, Any]:
        scope = {"scope": {"name": "kvasir", "version": __version__}, "spans": spans}
        return {"resourceSpans": [{"resource": {"attributes": attributes(self._resource)}, "scopeSpans": [scope]}]}

    def _post(self, body: bytes) -> None:
        """Raises OSError, HTTPException. A kept connection that was closed meanwhile is made again once."""
        kept = self._link is not None
        try:
            self._post_once(body)
        except (OSError, http.client.HTTPException):
            self._forget_link()
            if not kept:
                raise
            self._post_once(body)

    def _post_once(self, body: bytes) -> None:
        if self._link is None:
            host, port = self._parts.hostname or "", self._parts.port
            if self._parts.scheme == "https":
                context = ssl.create_default_context()
                self._link = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
            else:
                self._link = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
        self._link.request("POST", self._path, body, {"Content-Type": "application/json"})
        response = self._link.getresponse()
        rest = response.read(1 << 16)
        if response.status // 100 != 2:
            raise OSError(f"status {response.status}")
        if len(rest) == 1 << 16:
            self._forget_link()

    def _forget_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def span_object(context: TraceContext, span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": context.trace,
        "spanId": span.id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": _nanoseconds(span.begin),
        "endTimeUnixNano": _nanoseconds(max(span.begin, span.end)),
        "attributes": attributes(span.facts),
        "flags": 1,
    }
    if span.parent:
        found["parentSpanId"] = span.parent
    if context.state:
        found["traceState"] = context.state
    if span.events:
        found["events"] = [
            {"name": name, "timeUnixNano": _nanoseconds(at), "attributes": attributes(facts)}
            for name, at, facts in span.events
        ]
    if span.failed:
        found["status"] = {"code": 2}
    return found


def attributes(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in facts.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"stringValue": str(value)}


def _nanoseconds(seconds: float) -> str:
    return str(int(seconds * 1e9))
