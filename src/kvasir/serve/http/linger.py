"""A transport whose closing lets a client that is still sending read its response.

A socket that is closed with unread bytes resets the connection, and the client sees the reset instead of the response
(RFC 9112, section 9.6). So the write side is closed first, and further input is discarded, within bounds.
"""

from __future__ import annotations

import asyncio
from typing import Any

SECONDS = 30.0  # in total
QUIET = 5.0  # without receiving a byte


class LingeringTransport:
    """`close` closes at once unless `unread` reports a request that has not been received completely; then pass further
    input to `discard`, and the connection closes after `most` bytes, SECONDS, or QUIET seconds without input."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, most: int, unread: Any):
        self._transport = transport
        self._loop = loop
        self._left = most
        self._unread = unread
        self._timers: list[asyncio.TimerHandle] = []
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.lingers:
            return
        if self._transport.is_closing() or not self._unread():
            return self.end()
        self.lingers = True
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()
        self._transport.resume_reading()
        self._timers = [self._loop.call_later(seconds, self._transport.abort) for seconds in (SECONDS, QUIET)]

    def discard(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            return self._transport.abort()
        self._timers.pop().cancel()
        self._timers.append(self._loop.call_later(QUIET, self._transport.abort))

    def end(self) -> None:
        """Closes without lingering."""
        self.lost()
        self._transport.close()

    def lost(self) -> None:
        """The connection is closed."""
        while self._timers:
            self._timers.pop().cancel()
