"""Held: a model of a multi-model server that has an engine or is being loaded."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kvasir.serve.hosting.offers import Offer
from kvasir.serve.hosting.serving import Serving

FOREVER = 1e9  # seconds; longer times have no date


@dataclass(eq=False)
class Held:
    """used: when it was last leased, monotonic seconds.

    keep_alive: seconds for which it stays loaded after a lease of an owner without a wish. wishes: keep_alive of the
    owners that have one. until: by owner, the end of that time, monotonic seconds. expires: the last of them in seconds
    since 1970, None for never. placed: it has its place in memory. reserved: bytes. promised: bytes that leaving models
    free for it, or 0. leaving: it takes no more leases, and is unloaded when it has none.
    """

    offer: Offer
    keep_alive: float
    serving: Serving | None = None
    leases: int = 0
    used: float = 0.0
    wishes: dict[str, float] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)
    placed: bool = False
    reserved: int = 0
    promised: int = 0
    expires: float | None = None
    leaving: bool = False
    timer: asyncio.TimerHandle | None = None
    loading: asyncio.Task[None] = field(init=False, repr=False)
    ending: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def idle(self) -> bool:
        return self.serving is not None and not self.leases and self.ending is None

    def wish(self, owner: str, seconds: float, manages: bool) -> None:
        """Sets the keep_alive of an owner. manages: it applies to all owners and replaces their wishes."""
        if manages:
            self.keep_alive = seconds
            self.wishes.clear()
            self.until.clear()
        else:
            self.wishes[owner] = seconds

    def rest(self, owner: str) -> None:
        """The owner's keep_alive time starts."""
        self.used = time.monotonic()
        seconds = self.wishes.get(owner, self.keep_alive)
        self.until[owner] = self.used + (seconds if 0 <= seconds < FOREVER else FOREVER)
