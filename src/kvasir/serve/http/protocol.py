"""uvicorn's HTTP protocol with additional bounds: on connections, on bytes that precede a body, and on clients that do
not read."""

from __future__ import annotations

import logging
from asyncio import TimerHandle, Transport
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvasir.serve.http.connections import NARROW_TIME, Connections
from kvasir.serve.http.linger import LingeringTransport

log = logging.getLogger("kvasir.serve")


def bounded_protocol(
    connections: Connections,
    max_bytes: int,
    head_time: float,
    write_time: float,
    max_unread: int,
    on_stall: Callable[[], object] = lambda: None,
) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn's `http` option, which closes a connection that

    - sends more than `max_bytes` without a body byte or a complete head among them (headers, trailers, chunk
      extensions), of which the parser would keep every byte;
    - takes longer than `head_time` seconds for a head;
    - accepts no sent data for `write_time` seconds while the buffer is full; `on_stall` is called then. 0: no limit.

    A client that is still sending when its response ends may send up to `max_unread` bytes more, which are discarded,
    so that it can read the response.
    """

    class BoundedProtocol(HttpToolsProtocol):
        _quiet = 0  # bytes received since the parser last made progress
        _progress = False

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            self._lingering = LingeringTransport(transport, self.loop, max_unread, self._unread)
            super().connection_made(self._lingering)  # type: ignore[arg-type]
            self._narrow = connections.open(self, self.client[0] if self.client else None)
            seconds = min(head_time, NARROW_TIME) if self._narrow else head_time
            self._head = _Timer(self.loop.call_later, seconds, transport.close)
            self._write = _Timer(self.loop.call_later, write_time, self._give_up)
            self._head.start()
            if self._narrow == "full":
                transport.abort()

        @property
        def waits(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def drop(self) -> None:
            self._lingering.abort()

        def _unread(self) -> bool:
            return self.cycle is not None and self.cycle.more_body

        def connection_lost(self, exc: Exception | None) -> None:
            connections.close(self)
            self._lingering.lost()
            self._head.stop()
            self._write.stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._lingering.lingers:
                return self._lingering.discard(data)
            self._progress = False
            super().data_received(data)
            self._quiet = 0 if self._progress else self._quiet + len(data)
            if self._quiet > max_bytes and not self.transport.is_closing():
                self.send_400_response("Headers are too large.")
            if self.waits and self.timeout_keep_alive_task is None:
                self._head.start()  # bytes that begin no request must not keep a connection open

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._narrow:
                self.scope.setdefault("state", {})["narrow"] = self._narrow
            self._head.start()

        def on_response_complete(self) -> None:
            # If a request is queued, `self.cycle` is that request's; the ended one has then been received completely
            if not self.pipeline and self._unread():
                self.transport.close()
            super().on_response_complete()

        def shutdown(self) -> None:
            if self.waits:
                self._lingering.end()
            super().shutdown()

        def on_headers_complete(self) -> None:
            self._progress = True
            self._head.stop()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._progress = True
            super().on_body(body)

        def pause_writing(self) -> None:
            if write_time:
                self._write.start()
            super().pause_writing()

        def _give_up(self) -> None:
            log.warning("a client has read nothing for %g seconds; closing its connection", write_time)
            on_stall()
            self.transport.abort()

        def resume_writing(self) -> None:
            self._write.stop()
            super().resume_writing()

    return BoundedProtocol


class _Timer:
    """Calls `action` after `seconds` unless stopped. Starting it again while it runs has no effect."""

    def __init__(self, call_later: Callable[..., TimerHandle], seconds: float, action: Callable[[], object]):
        self._call_later = call_later
        self._seconds = seconds
        self._action = action
        self._handle: TimerHandle | None = None

    def start(self) -> None:
        if self._handle is None:
            self._handle = self._call_later(self._seconds, self._action)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
