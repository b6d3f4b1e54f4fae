"""Receiver: takes the messages of a ZeroMQ socket in their order, and misses none at its end.

A task that waits for a message may be cancelled after the message was received for it and before it runs again. The
message is then in the future that it waited for, and would be lost while later ones are still in the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import zmq.asyncio


class Receiver:
    """Calls `take` with each message, from now on."""

    def __init__(self, socket: zmq.asyncio.Socket, take: Callable[[bytes], None]):
        self._socket, self._take = socket, take
        self._next: asyncio.Future[bytes] | None = None
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self._next = cast("asyncio.Future[bytes]", self._socket.recv())
            self._take(await self._next)

    def cancel(self) -> None:
        """Ends at once; messages that wait are not taken."""
        self._task.cancel()

    async def end(self) -> None:
        """Takes all messages that have arrived, and no more."""
        await asyncio.sleep(0)
        self._task.cancel()
        await asyncio.wait([self._task])  # `await self._task` would hide that the caller itself was cancelled
        if not self._task.cancelled():
            self._task.result()
        if self._next and self._next.done() and not self._next.cancelled():
            self._take(self._next.result())
        while await self._socket.poll(0):
            self._take(await self._socket.recv())
