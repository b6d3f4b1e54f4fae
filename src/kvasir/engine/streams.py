"""Streams of deltas on the asyncio side of an engine: one bounded queue per request, which ends with its last choice.

The bound is kept by pausing: if a reader lets its queue fill up, the engine stops computing the request until most of
the queue is read. Deltas that are in progress when the engine learns of the pause still arrive.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

from kvasir.errors import InvalidRequest
from kvasir.types import Delta, FinishReason, Request

FULL = 4096  # unread entries at which a request pauses; a delta, an id or a log-probability: about 100 bytes each
LOW = FULL // 4  # unread entries at which it resumes


def entries(delta: Delta) -> int:
    """How many entries of its queue a delta takes."""
    read = (*delta.logprobs, *(delta.prompt_logprobs or ()))
    return 1 + len(delta.token_ids) + sum(1 + len(entry.top) for entry in read if entry is not None)


def is_plain(delta: Delta) -> bool:
    """Whether a delta is one token and nothing else."""
    return (
        len(delta.token_ids) == 1
        and delta.finish_reason is None
        and not delta.logprobs
        and not delta.carry
        and not delta.cached_tokens
        and not delta.drafted
        and delta.error is None
        and delta.stop_token is None
        and delta.embedding is None
        and delta.prompt_logprobs is None
        and not delta.notes
        and delta.progress is None
    )


class _Queue:
    """The deltas that a request's reader has not read. waiting: set when there is something to read."""

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

    def merged(self, delta: Delta) -> Delta:
        """The delta as one with the plain ones that wait after it, up to one of another choice."""
        if not is_plain(delta):
            return delta
        ids, at = [*delta.token_ids], delta.at
        while self.items:
            following, size = self.items[0]
            if isinstance(following, BaseException) or following.index != delta.index or not is_plain(following):
                break
            self.items.popleft()
            self.unread -= size
            ids.append(following.token_ids[0])
            at = following.at
        return delta if len(ids) == 1 else Delta(delta.id, delta.index, tuple(ids), at=at)


class _Leaving:
    """An id that the engine was told to abort. count: aborts that it has not acknowledged. gone: set when there are
    none."""

    __slots__ = ("count", "gone")

    def __init__(self) -> None:
        self.count = 0
        self.gone = asyncio.Event()


class Streams:
    """Owns the queues of all open requests. All methods run on the event loop."""

    def __init__(self, pause: Callable[[str, bool], None], merges: bool = False) -> None:
        """pause(id, whether): makes the engine pause or resume a request. merges: a reader that is late gets several
        tokens of a choice in one delta, except the first."""
        self._queues: dict[str, _Queue] = {}
        self._leaving: dict[str, _Leaving] = {}
        self._pause = pause
        self._merges = merges

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queues

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def unread(self) -> dict[str, int]:
        """Unread entries in each request's queue."""
        return {request_id: queue.unread for request_id, queue in self._queues.items()}

    def deliver(self, deltas: Iterable[Delta]) -> None:
        """Puts each delta into its request's queue; deltas of unknown requests are dropped."""
        for delta in deltas:
            queue = self._queues.get(delta.id)
            if queue is None:
                continue
            queue.put(delta, entries(delta))
            if queue.unread >= FULL and not queue.paused:
                queue.paused = True
                self._pause(delta.id, True)

    def fail(self, request_id: str, error: BaseException) -> None:
        """Makes the request's iterator raise `error`."""
        queue = self._queues.get(request_id)
        if queue is not None:
            queue.put(error, 1)

    def fail_all(self, error: BaseException) -> None:
        """Makes the iterators of all requests raise `error`."""
        for request_id in list(self._queues):
            self.fail(request_id, error)
        self.all_left()

    def abort(self, request_id: str, indices: Iterable[int]) -> None:
        """Ends choices from this side: the iterator gets a last delta for each."""
        reason = FinishReason.ABORT
        self.deliver([Delta(request_id, i, finish_reason=reason) for i in indices])

    def leaves(self, request_id: str) -> None:
        """Records that the engine was told to abort the request. Deltas of it may still arrive, so its id is not used
        for another before `left`."""
        self._leaving.setdefault(request_id, _Leaving()).count += 1

    def left(self, request_id: str) -> None:
        """Records that the engine has acknowledged an abort: deltas that arrive later are of a later request."""
        leaving = self._leaving.get(request_id)
        if leaving is None:  # the engine has been stopped in the meantime
            return
        leaving.count -= 1
        if not leaving.count:
            del self._leaving[request_id]
            leaving.gone.set()

    def all_left(self) -> None:
        """Records that the engine has ended: it acknowledges nothing any more."""
        for leaving in self._leaving.values():
            leaving.gone.set()
        self._leaving.clear()

    async def run(
        self, request: Request, send: Callable[[Request], None], cancel: Callable[[str], None]
    ) -> AsyncIterator[Delta]:
        """Sends the request and yields all its deltas; cancels it if the reader leaves early. Raises
        InvalidRequest if its id is in use."""
        while leaving := self._leaving.get(request.id):
            await leaving.gone.wait()
        if request.id in self._queues:
            raise InvalidRequest(f"request id {request.id!r} is already in use", param="request_id")
        queue = self._queues[request.id] = _Queue()
        open_answers = set(range(request.params.n)) - set(request.done)
        begun: set[int] = set()
        try:
            send(request)
            while open_answers:
                item = await queue.get()
                if self._merges and not isinstance(item, BaseException):
                    item = queue.merged(item) if item.index in begun else item
                    begun.add(item.index)
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
