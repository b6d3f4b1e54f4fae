"""Streams of deltas on the asyncio side of an engine: one bounded queue a request, ended when its last answer ends.

The bound holds by asking the engine to pause: a request whose reader has let its queue fill up computes no more until
the reader has emptied most of it. What was under way when the engine heard of it still comes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from kvasir.errors import InvalidRequest
from kvasir.types import Delta, FinishReason, Request

FULL = 4096  # entries unread at which a request pauses; one is a delta, an id, or a log-probability: about 100 bytes
LOW = FULL // 4  # entries unread at which it continues


def entries(delta: Delta) -> int:
    """What a delta takes of its queue's bound."""
    read = (*delta.logprobs, *(delta.prompt_logprobs or ()))
    return 1 + len(delta.token_ids) + sum(1 + len(entry.top) for entry in read if entry is not None)


class _Queue:
    """What a request's reader has not taken yet. waiting: where the reader waits for more."""

    __slots__ = ("items", "paused", "unread", "waiting")

    def __init__(self) -> None:
        self.items: deque[tuple[Delta | BaseException, int]] = deque()
        self.unread = 0  # entries
        self.paused = False
        self.waiting = asyncio.Event()

    def put(self, item: Delta | BaseException, size: int) -> None:
        self.items.append((item, size))
        self.unread += size
        self.waiting.set()

    async def get(self) -> Delta | BaseException:
        while not self.items:
            self.waiting.clear()
            await self.waiting.wait()
        item, size = self.items.popleft()
        self.unread -= size
        return item


class Streams:
    """Owns the queues of all open requests. All methods run on the event loop."""

    def __init__(self, pause: Callable[[str, bool], None]) -> None:
        """pause(id, whether): has the engine pause a request, or go on with it."""
        self._queues: dict[str, _Queue] = {}
        self._pause = pause

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def unread(self) -> dict[str, int]:
        """Entries in each request's queue."""
        return {request_id: queue.unread for request_id, queue in self._queues.items()}

    def deliver(self, deltas: Iterable[Delta]) -> None:
        """Hands each delta to its request; those of requests that are gone are dropped."""
        for delta in deltas:
            queue = self._queues.get(delta.id)
            if queue is None:
                continue
            queue.put(delta, entries(delta))
            if queue.unread >= FULL and not queue.paused:
                queue.paused = True
                self._pause(delta.id, True)

    def fail(self, request_id: str, error: BaseException) -> None:
        """The request's iterator raises `error`."""
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put(error, 1)

    def fail_all(self, error: BaseException) -> None:
        for request_id in list(self._queues):
            self.fail(request_id, error)

    def abort(self, request_id: str, indices: Iterable[int]) -> None:
        """Ends answers from this side: the iterator gets a last delta for each."""
        reason = FinishReason.ABORT
        self.deliver([Delta(request_id, i, finish_reason=reason) for i in indices])

    async def run(
        self, request: Request, send: Callable[[Request], None], cancel: Callable[[str], None]
    ) -> AsyncIterator[Delta]:
        """Sends the request and yields its deltas to the last; cancels it when the reader leaves early."""
        if request.id in self._queues:
            raise InvalidRequest(f"request id {request.id!r} is in use", param="request_id")
        queue = self._queues[request.id] = _Queue()
        open_answers = set(range(request.params.n)) - set(request.done)
        try:
            send(request)
            while open_answers:
                item = await queue.get()
                if queue.paused and queue.unread <= LOW:
                    queue.paused = False
                    self._pause(request.id, False)
                if isinstance(item, BaseException):
                    open_answers.clear()
                    raise item
                if item.index not in open_answers:
                    continue
                if item.finish_reason:
                    open_answers.discard(item.index)
                yield item
        finally:
            del self._queues[request.id]
            if open_answers:
                cancel(request.id)
