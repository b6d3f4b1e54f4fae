"""An OpenTelemetry collector that keeps what it gets: OTLP/HTTP with JSON."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.status = 200
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        [resource] = json.loads(body)["resourceSpans"]
        [scope] = resource["scopeSpans"]
        if self.status == 200:
            self.spans += [{**span, "attributes": facts(span)} for span in scope["spans"]]

    def wait(self, condition: Callable[[list[dict[str, Any]]], object], seconds: float = 60.0) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        while not condition(self.spans):
            assert time.monotonic() < deadline, [span["name"] for span in self.spans]
            time.sleep(0.02)
        return self.spans


def facts(item: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for one in item.get("attributes", ()):
        [(kind, value)] = one["value"].items()
        found[one["key"]] = int(value) if kind == "intValue" else value
    return found


@contextmanager
def collecting() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.take(self.path, body)
            self.send_response(found.status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        found.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
