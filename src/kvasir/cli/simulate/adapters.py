"""The adapters of a simulated service: which a request has, and loads that take virtual time."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate

from kvasir.inputs import Adapter
from kvasir.sched.adapters import AdapterPool


@dataclass(frozen=True, slots=True)
class AdapterSetup:
    """count: of the adapters, 0 for none. zipf: the k-th most popular is asked for with a weight of 1 / k ** zipf.
    room: how many are in memory. seconds: of a load; one is loaded at a time."""

    count: int = 0
    zipf: float = 1.0
    room: int = 64
    seconds: float = 0.05


NO_ADAPTERS = AdapterSetup()


class SimulatedAdapters:
    """All adapters have the same size. clock: in seconds. pool: what the scheduler gets."""

    def __init__(self, setup: AdapterSetup, clock: Callable[[], float]):
        self._setup, self._clock = setup, clock
        self._popular = [*accumulate((1 + k) ** -setup.zipf for k in range(setup.count))]
        self._loads: deque[tuple[float, Future[Held]]] = deque()  # (end, load), in order
        self.pool = AdapterPool(self if setup.count else None, setup.room, setup.room, setup.room, clock)

    def of(self, index: int) -> tuple[Adapter, ...]:
        """The adapters of the request of that index, in every run the same."""
        if not self._popular:
            return ()
        [name] = random.Random(index).choices(range(self._setup.count), cum_weights=self._popular)
        return (Adapter(str(name), content=str(name), nbytes=1),)

    @property
    def next_end(self) -> float:
        """When the next load ends; infinite if none is open."""
        return self._loads[0][0] if self._loads else math.inf

    def arrive(self) -> None:
        """Ends the loads whose time has come."""
        while self.next_end <= self._clock():
            self._loads.popleft()[1].set_result(Held())

    # -- as a Loader -------------------------------------------------------------------------------------------

    def begin(self, path: str, content: str) -> Future[Held]:
        after = self._loads[-1][0] if self._loads else self._clock()
        load: Future[Held] = Future()
        self._loads.append((after + self._setup.seconds, load))
        return load

    def close(self) -> None:
        self._loads.clear()


@dataclass(frozen=True, slots=True)
class Held:
    """An adapter in memory."""

    nbytes: int = 1
