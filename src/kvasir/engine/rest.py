"""Rest: the sleep of an engine, whose process has ended to free its memory, until it is woken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvasir.errors import EngineAsleep, KvasirError


def asleep() -> EngineAsleep:
    """What calls of a sleeping engine raise."""
    return EngineAsleep("the model is asleep", "wake it with POST /wake_up")


class Rest:
    """begun: set once the process has ended."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self._called = asyncio.Event()
        self._callers: list[asyncio.Future[None]] = []

    async def wake(self) -> None:
        """Returns when the engine is awake. Raises KvasirError if it cannot start; then it sleeps on."""
        caller: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._callers.append(caller)
        self._called.set()
        await caller

    async def over(self, launch: Callable[[], Awaitable[None]]) -> None:
        """Returns when `launch`, which a call of `wake` begins, has started a process."""
        self.begun.set()
        try:
            while True:
                await self._called.wait()
                self._called.clear()
                try:
                    await launch()
                except KvasirError as error:
                    self._answer(error)
                else:
                    return self._answer(None)
        finally:
            self._answer(asleep())

    def _answer(self, error: KvasirError | None) -> None:
        callers, self._callers = self._callers, []
        for caller in callers:
            if caller.done():
                continue
            caller.set_exception(error) if error else caller.set_result(None)
