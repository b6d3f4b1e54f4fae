"""Several models on fake engines, for servers of several: what is launched, and what is still there."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from kvasir.adapters import parse_adapters
from kvasir.config import EngineOptions
from kvasir.engine.adapter_shelf import AdapterShelf
from kvasir.engine.front import Front
from kvasir.errors import KvasirError
from kvasir.serve.hosting.model_manager import ModelManager
from kvasir.serve.hosting.offers import GivenOffers, Offer
from kvasir.serve.settings import ServeSettings
from kvasir.store.entry import Details
from tests.serve.running import make_front

MIB = 1 << 20
NAMES = ("a", "b", "c")


def offer(name: str, size: int = 0, identity: str = "1", **changes) -> Offer:
    details = Details(family="echo", context_length=512, kv_bytes_per_token=1024)
    return replace(Offer(name, identity, size, details, lambda: EngineOptions(name)), **changes)


class Shelf(GivenOffers):
    """Offers that may change while they are served."""

    def set(self, new: Offer) -> None:
        self._offers[new.name] = new

    def remove(self, name: str) -> None:
        self._offers.pop(name, None)


@dataclass
class Launcher:
    """Starts echo engines; a model that is in `failing` fails with that error. gate: what loads wait for.
    most: engines that were there at once."""

    failing: dict[str, Exception] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    launched: list[tuple[EngineOptions, Front]] = field(default_factory=list)
    loads: int = 0
    most: int = 0

    async def __call__(self, options: EngineOptions) -> Front:
        self.loads += 1
        if self.gate is not None:
            await self.gate.wait()
        if options.model in self.failing:
            raise self.failing[options.model]
        front = make_front(info={"name": options.model})
        front.adapters = AdapterShelf(front.engine, parse_adapters(options.lora or ()))
        await front.start()
        self.launched.append((options, front))
        self.most = max(self.most, len(self.there))
        return front

    @property
    def there(self) -> list[str]:
        return [options.model for options, front in self.launched if not front.engine.ended]


class Broken(KvasirError):
    pass


@asynccontextmanager
async def several(launcher: Launcher, shelf: Shelf | None = None, **options):
    catalogue = ModelManager(shelf or Shelf([offer(name) for name in NAMES]), launcher, ServeSettings(), **options)
    await catalogue.start()
    try:
        yield catalogue
    finally:
        await catalogue.stop()
        assert launcher.there == []
        assert not catalogue.held
