"""Limits rendering and tokenizing: a few texts at once, in turns between keys; work ends when its client leaves."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvasir.errors import QueueFull
from kvasir.text.sandbox import Hold
from kvasir.text.tokenizer_process import MAX_WORKERS

LONG_BYTES = 64 << 10  # texts of this size or more leave one place to shorter texts
MAX_WAITING, MAX_WAITING_PER_KEY = 4096, 1024  # at least as many as may wait in the engine by default
MAX_BYTES, MAX_BYTES_PER_KEY = 256 << 20, 64 << 20  # of the texts that wait or are being tokenized

T = TypeVar("T")


async def _stays(work: Coroutine[Any, Any, T]) -> T:
    return await work


@dataclass(frozen=True, slots=True)
class Asker:
    """The client for which a text is rendered or tokenized. while_here: runs a coroutine, and cancels it if the client
    leaves."""

    key: str = ""
    while_here: Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]] = _stays


NO_ONE = Asker()
ASKER: ContextVar[Asker] = ContextVar("asker", default=NO_ONE)


def size_of(text: str) -> int:
    """The size of a text in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def size_within(value: object) -> int:
    """The number of characters of all strings in a JSON-like value."""
    if isinstance(value, Mapping):
        return sum(map(size_within, value.values()))
    return len(value) if isinstance(value, str) else sum(map(size_within, value)) if isinstance(value, list) else 0


def batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in order, in batches: each is a single text, or shorter than LONG_BYTES."""
    start, size = 0, 0
    for i, text in enumerate(texts):
        length = size_of(text)
        if i > start and size + length >= LONG_BYTES:
            yield texts[start:i]
            start, size = i, 0
        size += length
    if start < len(texts):
        yield texts[start:]


class _Waiter:
    def __init__(self, key: str, size: int):
        self.key, self.size, self.long = key, size, size >= LONG_BYTES
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Turns:
    """A pool of threads with fair turns. Used from one event loop."""

    def __init__(self, places: int = MAX_WORKERS, what: str = "tokenize"):
        self._free, self._free_for_long = places, max(1, places - 1)
        self._waiting: OrderedDict[str, list[_Waiter]] = OrderedDict()  # by key, in the order of their turns
        self._bytes: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(places, f"kvasir-{what}")

    async def run(self, size: int, work: Callable[[Hold], T]) -> T:
        """Runs `work`, for texts of `size` bytes, in a thread. Raises QueueFull, and what `work` raises."""
        asker = ASKER.get()
        job = self._run(_Waiter(asker.key, size), work)
        return await (asker.while_here(job) if size >= LONG_BYTES else job)

    async def _run(self, waiter: _Waiter, work: Callable[[Hold], T]) -> T:
        self._join(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            self._leave(waiter)
            raise
        hold, loop = Hold(), asyncio.get_running_loop()
        done: Future[T] = self._threads.submit(work, hold)
        # The place is free when the thread is, which may be after the client left.
        done.add_done_callback(lambda _: _call_soon(loop, partial(self._release, waiter)))
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            if waiter.long:
                loop.run_in_executor(None, hold.end)
            raise

    def close(self) -> None:
        """Cancels waiting work; the threads end after their current work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _join(self, waiter: _Waiter) -> None:
        own, total = self._waiting.get(waiter.key, []), sum(map(len, self._waiting.values()))
        bytes_own, bytes_total = self._bytes.get(waiter.key, 0), sum(self._bytes.values())
        crowded = len(own) >= MAX_WAITING_PER_KEY or total >= MAX_WAITING
        heavy = bytes_own and (bytes_own + waiter.size > MAX_BYTES_PER_KEY or bytes_total + waiter.size > MAX_BYTES)
        if crowded or heavy:
            raise QueueFull(
                "too many texts are waiting to be tokenized", "try again in a moment, or send shorter texts"
            )
        self._bytes[waiter.key] = bytes_own + waiter.size
        self._waiting.setdefault(waiter.key, own).append(waiter)
        self._grant()

    def _leave(self, waiter: _Waiter) -> None:
        """Removes a waiter that was cancelled, before its turn or just after it was granted."""
        if waiter.turn.done() and not waiter.turn.cancelled():
            return self._release(waiter)
        own = self._waiting[waiter.key]
        own.remove(waiter)
        if not own:
            del self._waiting[waiter.key]
        self._forget(waiter)

    def _release(self, waiter: _Waiter) -> None:
        self._free += 1
        self._free_for_long += waiter.long
        self._forget(waiter)
        self._grant()

    def _forget(self, waiter: _Waiter) -> None:
        left = self._bytes[waiter.key] - waiter.size
        if left or waiter.key in self._waiting:
            self._bytes[waiter.key] = left
        else:
            del self._bytes[waiter.key]

    def _grant(self) -> None:
        while self._free and (waiter := self._next()) is not None:
            self._free -= 1
            self._free_for_long -= waiter.long
            waiter.turn.set_result(None)

    def _next(self) -> _Waiter | None:
        """The first text that may run, of the first key that has one; the key then goes to the end."""
        for key, own in self._waiting.items():
            found = next((w for w in own if not w.turn.done() and (self._free_for_long > 0 or not w.long)), None)
            if found is not None:
                own.remove(found)
                del self._waiting[key]
                if own:
                    self._waiting[key] = own
                return found
        return None


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
