"""Several results for one HTTP request: all or nothing, with bounded concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

from kvasir.serve.http.asgi import settle

S = TypeVar("S")
T = TypeVar("T")

AT_ONCE = 64
UNREAD = 64  # items of merged streams that may wait to be read


async def all_of(function: Callable[[S], Awaitable[T]], items: Iterable[S], at_once: int = AT_ONCE) -> list[T]:
    """The function's results for all items, in their order. The first error cancels the rest and is raised."""
    gate = asyncio.Semaphore(at_once)

    async def one(item: S) -> T:
        async with gate:
            return await function(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await settle(*tasks)


async def merge(
    streams: Sequence[AsyncGenerator[T]], at_once: int = AT_ONCE, ahead: bool = True
) -> AsyncGenerator[tuple[int, T]]:
    """The items of all streams as they arrive, each with the number of its stream. The first error cancels the rest and
    is raised. Streams wait while their items are not read; a single one is not read ahead, and none is without `ahead`:
    a stream then is asked for its next item once the one before has been dealt with. Close it (aclosing) when leaving
    early."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue(UNREAD)
    gate = asyncio.Semaphore(at_once)

    async def pump(number: int, stream: AsyncGenerator[T]) -> None:
        async with gate, aclosing(stream) as items:
            async for item in items:
                await queue.put((number, item))
                if not ahead:
                    await queue.join()

    async def ending() -> None:
        """Puts the end marker once all streams have ended or one has failed. Not on cancellation: nothing reads the
        queue then."""
        try:
            await asyncio.gather(*tasks)
        except Exception:
            await queue.put(None)
            raise
        await queue.put(None)

    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    everything = asyncio.ensure_future(ending())
    try:
        while (item := await queue.get()) is not None:
            yield item
            queue.task_done()
        await everything
    finally:
        await settle(*tasks, everything)
