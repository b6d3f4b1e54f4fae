"""How many lines of batches run at once: enough to keep all engines busy, and few more, since those wait in them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvasir.serve.http.asgi import settle

log = logging.getLogger("kvasir.serve")

LEAST, MOST = 16, 4096
SPARE = 1.25  # lines for each choice that the engines compute at once, so that one waits when another ends
LOOK_SECONDS = 2.0


class Places:
    """A semaphore whose size may change. The first to come is the first to enter."""

    def __init__(self, size: int):
        self._size = size
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size
        self._let_in()

    async def enter(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had just been let in
                self.leave()
            raise

    def leave(self) -> None:
        self.taken -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.taken < self._size:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise it was cancelled
                self.taken += 1
                turn.set_result(None)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        await self.enter()
        try:
            yield
        finally:
            self.leave()


class InFlight:
    """The places of all lines, and of those of each batch, which also counts lines that are to be tried again. Their
    number follows what the engines compute at once, which changes when replicas come and go."""

    def __init__(self, fixed: int | None, rows: Callable[[], Awaitable[int]]):
        """fixed: the number, if it does not change. rows: returns how many choices the engines compute at once."""
        self._fixed, self._rows = fixed, rows
        self.all = Places(fixed or LEAST)
        self._each: list[Places] = []
        self._following: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[Places]:
        """The places of one batch, while it runs."""
        own = Places(self.all.size)
        self._each.append(own)
        if self._following is None and self._fixed is None:
            self._following = asyncio.ensure_future(self._follow())
        try:
            yield own
        finally:
            self._each.remove(own)
            if not self._each and self._following is not None:
                following, self._following = self._following, None
                await settle(following)

    async def _follow(self) -> None:
        while True:
            try:
                size = min(MOST, max(LEAST, round(SPARE * await self._rows())))
            except Exception:
                log.exception("the number of lines in flight stays %d", self.all.size)
            else:
                for places in (self.all, *self._each):
                    places.size = size
            await asyncio.sleep(LOOK_SECONDS)
