"""Watches over an engine's process: asks it for replies again and again, and kills it if it is hung."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Coroutine
from typing import Any

from kvasir.engine.watchdog import Watchdog, use_of
from kvasir.engine.wire import Reply
from kvasir.errors import EngineDead

log = logging.getLogger("kvasir.engine")


async def watch(process: subprocess.Popen, watchdog: Watchdog, pulse: Callable[[], Coroutine[Any, Any, Reply]]) -> None:
    """Returns when the process is gone, or was killed. pulse: its reply, with the time of its longest step."""
    watchdog.heard()
    while True:
        asked, last = asyncio.ensure_future(pulse()), time.monotonic()
        try:
            while not asked.done():
                await asyncio.wait([asked], timeout=watchdog.pause)
                now = time.monotonic()
                watchdog.tick(now - last, use_of(process.pid))
                last = now
                if verdict := watchdog.verdict:
                    log.error("the engine process is hung: %s; killing it", verdict)
                    return process.kill()
            watchdog.longest = asked.result().longest_step
        except (EngineDead, AssertionError):
            return
        finally:
            asked.cancel()
        watchdog.heard()
        await asyncio.sleep(8 * watchdog.pause)
