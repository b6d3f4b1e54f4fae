"""Several answers for one HTTP request: all or nothing, never more than a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TypeVar

from kvasir.serve.asgi import settle

S = TypeVar("S")
T = TypeVar("T")

AT_ONCE = 64


async def all_of(function: Callable[[S], Awaitable[T]], items: Iterable[S], at_once: int = AT_ONCE) -> list[T]:
    """The function's results for all items, in their order. The first error ends the rest and is raised."""
    gate = asyncio.Semaphore(at_once)

    async def one(item: S) -> T:
        async with gate:
            return await function(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await settle(*tasks)


async def merge(streams: Sequence[AsyncGenerator[T]], at_once: int = AT_ONCE) -> AsyncGenerator[tuple[int, T]]:
    """The items of all streams as they come, each with the number of its stream. The first error ends the
    rest and is raised. Close it (aclosing) when leaving early."""
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()
    gate = asyncio.Semaphore(at_once)

    async def pump(number: int, stream: AsyncGenerator[T]) -> None:
        async with gate, aclosing(stream) as items:
            async for item in items:
                queue.put_nowait((number, item))

    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    everything = asyncio.gather(*tasks)
    everything.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (item := await queue.get()) is not None:
            yield item
        await everything
    finally:
        await settle(*tasks, everything)
