"""Which model is loaded next, and which idle models are unloaded for it.

A model that waits for memory holds up no other: a later one that fits is loaded first. Idle models are unloaded only if
that makes a waiting model fit, and the memory they free is promised to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvasir.config import EngineOptions
from kvasir.errors import EngineDead
from kvasir.serve.held import Held
from kvasir.serve.memory_budget import MemoryBudget, needed, unloading
from kvasir.serve.offers import Offer


class AdmissionQueue:
    """budget: of the memory. most: models loaded at once. patience: seconds that a model waits at most. all: returns
    the models that exist. leave: begins to unload one."""

    def __init__(
        self,
        budget: MemoryBudget,
        most: int,
        patience: float,
        all: Callable[[], Sequence[Held]],
        leave: Callable[[Held], None],
    ):
        self._budget = budget
        self._most = most
        self._patience = patience
        self._all = all
        self._leave = leave
        self._waiting: list[Held] = []  # in the order in which they came
        self._freed = asyncio.Event()

    def freed(self) -> None:
        """To be called when a model has gone, or has no lease any more."""
        self._freed.set()

    async def take(self, held: Held, options: EngineOptions) -> tuple[int | None, int]:
        """Waits for a place; idle models go for it, the one first that was leased least recently. Returns the bytes
        that are free (None where that is not known) and how many models have a place beside it. Raises EngineDead."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        need = sum(needed(held.offer, options))
        self._waiting.append(held)
        try:
            while True:
                self._freed.clear()
                found = self._find(held, need)
                if found is not None:
                    return found
                if not held.leases or not await self._wait_freed(until - loop.time()):
                    raise self._no_room(held.offer, need)
        finally:
            self._waiting.remove(held)
            held.promised = 0
            self._freed.set()

    def _find(self, held: Held, need: int) -> tuple[int | None, int] | None:
        """A place for one that waits, if there is one that is not promised to others; else those begin to leave that
        make one. Raises EngineDead where there never will be one."""
        placed = [other for other in self._all() if other.placed]
        free = self._budget.free(other.reserved for other in placed)
        if free is not None and need > free + sum(other.reserved for other in placed):
            raise self._no_room(held.offer, need)
        before = [other for other in self._waiting[: self._waiting.index(held)] if other.promised]
        free = None if free is None else max(0, free - sum(other.promised for other in before))
        taken = len(placed) + len(before)
        if taken < self._most and (free is None or need <= free):
            held.placed, held.reserved = True, need
            return free, taken
        ending = [other.reserved for other in placed if other.ending is not None]
        idle = sorted((other for other in placed if other.idle), key=lambda other: other.used)
        going = unloading(need, free, self._most - taken, ending, [other.reserved for other in idle])
        held.promised = 0 if going is None else need
        for other in idle[:going] if going and held.leases else ():
            self._leave(other)
        return None

    async def _wait_freed(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._freed.wait(), max(0.0, seconds))
        except TimeoutError:
            return False
        return True

    def _no_room(self, offer: Offer, need: int) -> EngineDead:
        placed = [other for other in self._all() if other.placed]
        if len(placed) >= self._most:
            problem = f"{len(placed)} models are answering, and no more may be loaded at once"
            return EngineDead(f"{offer.name} is not loaded: {problem}", "try again later, or raise --max-loaded-models")
        free = self._budget.free(other.reserved for other in placed) or 0
        room = f"it takes about {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        return EngineDead(f"{offer.name} is not loaded: {room}", "free memory, or use a smaller or quantized model")
