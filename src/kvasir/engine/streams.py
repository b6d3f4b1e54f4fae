"""Streams of deltas on the asyncio side of an engine: one queue a request, ended when its last answer ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from kvasir.errors import InvalidRequest
from kvasir.types import Delta, FinishReason, Request


class Streams:
    """Owns the queues of all open requests. All methods run on the event loop."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Delta | BaseException]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    def deliver(self, deltas: Iterable[Delta]) -> None:
        """Hands each delta to its request; those of requests that are gone are dropped."""
        for delta in deltas:
            queue = self._queues.get(delta.id)
            if queue is not None:
                queue.put_nowait(delta)

    def fail(self, request_id: str, error: BaseException) -> None:
        """The request's iterator raises `error`."""
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put_nowait(error)

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
        queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        self._queues[request.id] = queue
        open_answers = set(range(request.params.n)) - set(request.done)
        try:
            send(request)
            while open_answers:
                item = await queue.get()
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
