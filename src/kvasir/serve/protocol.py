"""uvicorn's HTTP protocol with the bounds it lacks: on what comes before a body, and on clients that do not
read."""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def bounded_protocol(max_bytes: int, head_time: float, write_time: float) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn's `http` option, which closes a connection that

    - sends more than `max_bytes` without a body byte or a complete head among them (headers, trailers, chunk
      extensions), of which the parser would keep every byte;
    - takes longer than `head_time` seconds for a head;
    - takes none of what is sent for `write_time` seconds while the buffer is full.
    """

    class BoundedProtocol(HttpToolsProtocol):
        _quiet = 0  # bytes received since the parser last made progress
        _progress = False

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._head = _Timer(self.loop.call_later, head_time, transport.close)
            self._write = _Timer(self.loop.call_later, write_time, transport.abort)
            self._head.start()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head.stop()
            self._write.stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._progress = False
            super().data_received(data)
            self._quiet = 0 if self._progress else self._quiet + len(data)
            if self._quiet > max_bytes and not self.transport.is_closing():
                self.send_400_response("Headers are too large.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head.start()

        def on_headers_complete(self) -> None:
            self._progress = True
            self._head.stop()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._progress = True
            super().on_body(body)

        def pause_writing(self) -> None:
            self._write.start()
            super().pause_writing()

        def resume_writing(self) -> None:
            self._write.stop()
            super().resume_writing()

    return BoundedProtocol


class _Timer:
    """Calls `action` after `seconds` unless it is stopped; a second start changes nothing."""

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
