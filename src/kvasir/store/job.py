"""Follows a long change of the store from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from threading import Event

from kvasir.store.progress import PullProgress, Report


async def follow(change: Callable[[Report, Event], object]) -> AsyncGenerator[PullProgress]:
    """Runs `change(report, stop)` in a thread and yields its progress reports; at the end raises its exception, if any.

    Closing the generator stops the change, and waits until it has stopped.
        async with aclosing(follow(lambda report, stop: store.pull(ref, report=report, stop=stop))) as events: ...
    """
    loop, stop = asyncio.get_running_loop(), Event()
    queue: asyncio.Queue[PullProgress | None] = asyncio.Queue()
    running = asyncio.ensure_future(asyncio.to_thread(change, lambda p: _put(loop, queue, p), stop))
    running.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (progress := await queue.get()) is not None:
            yield progress
        await running
    finally:
        stop.set()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # retrieved here in case the caller closed early


def _put(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue, progress: PullProgress) -> None:
    loop.call_soon_threadsafe(queue.put_nowait, progress)
