"""uvicorn's HTTP protocol with two bounds it lacks: bytes and time that may pass before headers are
complete."""

from __future__ import annotations

from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def bounded_protocol(max_bytes: int, max_seconds: float) -> type[HttpToolsProtocol]:
    """A protocol class for uvicorn's `http` option."""

    class BoundedProtocol(HttpToolsProtocol):
        """Closes a connection that sends more than `max_bytes` without a body byte or a complete head among
        them (headers, trailers, chunk extensions), or takes longer than `max_seconds` for a head once it
        has begun."""

        _quiet = 0  # bytes received since the parser last made progress
        _progress = False
        _timer: TimerHandle | None = None

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._progress = False
            super().data_received(data)
            self._quiet = 0 if self._progress else self._quiet + len(data)
            if self._quiet > max_bytes and not self.transport.is_closing():
                self.send_400_response("Headers are too large.")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._timer is None:
                self._arm()

        def on_headers_complete(self) -> None:
            self._progress = True
            self._disarm()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._progress = True
            super().on_body(body)

        def _arm(self) -> None:
            self._timer = self.loop.call_later(max_seconds, self._late)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            self._timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return BoundedProtocol
