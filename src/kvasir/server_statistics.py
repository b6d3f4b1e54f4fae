"""What is counted of a server, whatever its models; a part of the table in `statistics`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvasir.metrics import Chart, Histogram, counter, each, gauge, histogram

REQUESTS, OPERATION = "Requests", "Operation"  # rows of the dashboard


@dataclass
class LogStats:
    dropped: int = counter(
        "log_lines_dropped",
        "Log lines dropped because the log could not keep up.",
        Chart(OPERATION, "Log lines dropped"),
    )


@dataclass
class HttpStats:
    """Statistics of the server, whatever the model."""

    responses: Counter[tuple[str, str, int]] = counter(
        "http_requests",
        "HTTP requests answered, by route, method and status.",
        Chart(REQUESTS, "HTTP responses", by=("code",), unit="reqps"),
        Chart(REQUESTS, "HTTP requests by route", by=("method", "route"), unit="reqps"),
        start=Counter,
        labels=("route", "method", "code"),
    )
    seconds: Histogram = histogram("http_request_seconds", "Time of an HTTP request.", Chart(REQUESTS, "HTTP time"))
    open: int = gauge("http_requests_open", "HTTP requests in progress.", Chart(REQUESTS, "Open requests", "HTTP"))
    stalled: int = counter(
        "http_stalled",
        "Connections closed because the client did not read the response.",
        Chart(OPERATION, "Slow readers", "connections closed per second"),
    )
    streams: Counter[str] = gauge(
        "http_streams_open",
        "Streams in progress, by whether they have event ids.",
        Chart(REQUESTS, "Open requests", "streams, event ids:"),
        start=Counter,
        labels=("event_ids",),
    )
    broken: Counter[str] = counter(
        "http_streams_broken",
        "Streams that the server broke off, by an error or by the end of the process that served them. Those without "
        "event ids cannot be continued.",
        Chart(OPERATION, "Streams broken off", "event ids:"),
        start=Counter,
        labels=("event_ids",),
    )
    continuations: Counter[str] = counter(
        "http_streams_continued",
        "Requests to continue a stream that broke, by outcome: continued or refused.",
        Chart(OPERATION, "Streams continued"),
        start=Counter,
        labels=("outcome",),
    )
    reloads: Counter[tuple[str, str]] = counter(
        "reloads",
        "Reloads of key and certificate files, by file and outcome.",
        Chart(OPERATION, "File reloads"),
        start=Counter,
        labels=("file", "outcome"),
    )
    spans: Counter[str] = counter(
        "trace_spans",
        "Spans of traces, by what became of them: sent to the collector or dropped.",
        Chart(OPERATION, "Spans of traces"),
        start=Counter,
        labels=("outcome",),
    )
    logs: dict[str, Any] = each("log", LogStats)
