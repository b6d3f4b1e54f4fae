"""Decides which model is loaded next, and which idle models are unloaded for it.

A model that waits for memory does not block the others: a later one that fits is loaded first. Idle models are unloaded
only if that makes a waiting model fit, and the memory they free is promised to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvasir.config import EngineOptions
from kvasir.errors import EngineDead
from kvasir.serve.hosting.held import Held
from kvasir.serve.hosting.memory_budget import MemoryBudget, needed, unloading
from kvasir.serve.hosting.offers import Offer


class AdmissionQueue:
    """budget: of the memory. most: maximum number of loaded models. patience: maximum seconds that a model waits. all:
    returns all models. leave: starts to unload a model."""

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
        self.waiting: list[Held] = []  # in order of arrival
        self._freed = asyncio.Event()

    def freed(self) -> None:
        """Call it when a model has been unloaded, or has lost its last lease."""
        self._freed.set()

    async def take(self, held: Held, options: EngineOptions) -> tuple[int | None, int]:
        """Waits for a place; idle models are unloaded to make one, the least recently leased first. Returns the free
        bytes (None if unknown) and the number of other models that have a place. Raises EngineDead if the model can
        never fit, gets no place within the patience, or has no lease any more."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        need = sum(needed(held.offer, options))
        self.waiting.append(held)
        try:
            while True:
                self._freed.clear()
                found = self._find(held, need)
                if found is not None:
                    return found
                if not held.leases or not await self._wait_freed(until - loop.time()):
                    raise self._no_room(held.offer, need)
        finally:
            self.waiting.remove(held)
            held.promised = 0
            self._freed.set()

    def _find(self, held: Held, need: int) -> tuple[int | None, int] | None:
        """Takes a place for a waiting model if one is free and not promised to earlier ones; otherwise starts to unload
        the idle models whose places suffice. Raises EngineDead if the model can never fit."""
        placed = [other for other in self._all() if other.placed]
        free = self._budget.free(other.reserved for other in placed)
        if free is not None and need > free + sum(other.reserved for other in placed):
            raise self._no_room(held.offer, need)
        before = [other for other in self.waiting[: self.waiting.index(held)] if other.promised]
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
            problem = f"{len(placed)} models are in use, and no more may be loaded at once"
            return EngineDead(f"{offer.name} is not loaded: {problem}", "try again later, or raise --max-loaded-models")
        free = self._budget.free(other.reserved for other in placed) or 0
        room = f"it needs about {need / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        return EngineDead(f"{offer.name} is not loaded: {room}", "free memory, or use a smaller or quantized model")
