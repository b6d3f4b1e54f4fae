"""A server of several models: each is loaded when it is first asked for, into an engine of its own, and unloaded when
nobody has asked for a while or another one needs its place.

    absent -> loading -> loaded: leased <-> idle -> leaving -> absent
                 |                   |                ^
                 +-> failed          +-- changed -----+   (when its last lease ends)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvasir.config import EngineOptions
from kvasir.engine.front import Front
from kvasir.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    KvasirError,
    ModelFileError,
    ModelNotFound,
    UnsupportedModel,
)
from kvasir.serve.catalogue import Card, Catalogue
from kvasir.serve.offers import Offer, Offers
from kvasir.serve.room import Room, needed
from kvasir.serve.serving import Serving
from kvasir.serve.settings import ServeSettings
from kvasir.store.store import Store

log = logging.getLogger("kvasir.serve")

FOREVER = 1e9  # seconds: what is longer has no date
PATIENCE = 60.0  # seconds for which a model waits for the place of another that is answering

# A front that was started. Raises KvasirError; cancelled, it leaves nothing behind.
Launch = Callable[[EngineOptions], Awaitable[Front]]


@dataclass(eq=False)
class Held:
    """A model that has an engine, or is getting one. used: when it was last leased, monotonic seconds. reserved: bytes.
    expires: seconds since 1970, None for never. leaving: it takes no more leases, and goes when it has none."""

    offer: Offer
    keep_alive: float
    serving: Serving | None = None
    leases: int = 0
    used: float = 0.0
    reserved: int = 0
    expires: float | None = None
    leaving: bool = False
    timer: asyncio.TimerHandle | None = None
    loading: asyncio.Task[None] = field(init=False, repr=False)
    ending: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def idle(self) -> bool:
        return self.serving is not None and not self.leases and self.ending is None


class Several(Catalogue):
    """keep_alive: seconds for which a model stays after its last lease, below 0 for ever. max_loaded: models at once.
    available: bytes of memory on the host now, None where that says nothing."""

    def __init__(
        self,
        offers: Offers,
        launch: Launch,
        settings: ServeSettings,
        *,
        store: Store | None = None,
        keep_alive: float = 300.0,
        max_loaded: int = 3,
        available: Callable[[], int | None] = lambda: None,
        patience: float = PATIENCE,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        super().__init__(settings, clock)
        self.store = store
        self._offers = offers
        self._launch = launch
        self._keep_alive = keep_alive
        self._max_loaded = max_loaded
        self._room = Room(available, max_loaded)
        self._patience = patience
        self._held: dict[str, Held] = {}  # by name: those that may be leased
        self._leaving: set[Held] = set()
        self._one_load = asyncio.Lock()
        self._freed = asyncio.Event()
        self._end: asyncio.Future[None] | None = None

    async def start(self) -> None:
        self._offers.all()

    async def stop(self) -> None:
        if self._end is None:
            self._end = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._end)

    async def _stop(self) -> None:
        everything = self._all()
        for held in everything:
            held.loading.cancel()
        await asyncio.gather(*(held.loading for held in everything), return_exceptions=True)
        await asyncio.gather(*(self._end_of(held) for held in everything))

    # -- what there is -------------------------------------------------------------------------------------

    def cards(self) -> Sequence[Card]:
        return [self._card(offer) for offer in self._offers.all()]

    def card(self, name: str) -> Card:
        return self._card(self._offer(name))

    def _card(self, offer: Offer) -> Card:
        held = self._held.get(offer.name)
        known = offer.details.context_length or None
        length = held.serving.front.info.max_model_len if held and held.serving else known
        return Card(offer.name, offer.created, offer.name, length, offer)

    def loaded(self) -> Sequence[Serving]:
        return [held.serving for held in self._held.values() if held.serving is not None]

    def expires(self, serving: Serving) -> float | None:
        return next((held.expires for held in self._held.values() if held.serving is serving), None)

    def _offer(self, name: str) -> Offer:
        offer = self._offers.find(name)
        if offer is None:
            shown = ", ".join(repr(offer.name) for offer in self._offers.all()[:3]) or "nothing"
            hint = f"served: {shown}" if self.store is None else f"`kvasir pull` it first; there is: {shown}"
            raise ModelNotFound(f"the model {name[:200]!r} does not exist here", hint)
        return offer

    # -- leases --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, name: str | None, keep_alive: float | None = None) -> AsyncIterator[Serving]:
        held = self._hold(self._only() if name is None else self._offer(name))
        held.leases += 1
        self._stop_timer(held)
        try:
            serving = await self._loaded(held)
            if keep_alive is not None:
                held.keep_alive = keep_alive
            yield serving
        finally:
            held.leases -= 1
            held.used = time.monotonic()
            self._rest(held)

    async def _loaded(self, held: Held) -> Serving:
        try:
            await asyncio.shield(held.loading)
        except asyncio.CancelledError:
            if held.loading.cancelled():
                raise EngineDead("the server ends") from None
            raise
        assert held.serving is not None, "a load that does not raise has one"
        return held.serving

    def _only(self) -> Offer:
        offers = self._offers.all()
        if len(offers) != 1:
            names = ", ".join(repr(offer.name) for offer in offers[:3]) or "none yet"
            raise InvalidRequest(f"there are {len(offers)} models", f"name one: {names}", param="model")
        return offers[0]

    def _hold(self, offer: Offer) -> Held:
        """The model, loaded or on its way. What has changed since it was loaded leaves when its answers end."""
        if self._end is not None:
            raise EngineDead("the server ends")
        for held in list(self._held.values()):
            now = offer if held.offer.name == offer.name else self._offers.find(held.offer.name)
            is_over = held.serving is not None and held.serving.front.engine.ended
            if now is None or now.identity != held.offer.identity or is_over:
                self._begin_leaving(held)
        held = self._held.get(offer.name)
        if held is None:
            held = self._held[offer.name] = Held(offer, self._keep_alive)
            held.loading = asyncio.ensure_future(self._load(held))
            held.loading.add_done_callback(lambda task, held=held: self._settled(held, task))
        return held

    def _rest(self, held: Held) -> None:
        """What is to happen with a model that nobody has leased."""
        if held.leases:
            return
        self._freed.set()
        if not held.idle:
            return
        if held.leaving or held.keep_alive == 0:
            self._begin_leaving(held)
        elif 0 < held.keep_alive < FOREVER:
            loop = asyncio.get_running_loop()
            held.timer = loop.call_later(held.keep_alive, self._begin_leaving, held)
            held.expires = time.time() + held.keep_alive

    @staticmethod
    def _stop_timer(held: Held) -> None:
        if held.timer is not None:
            held.timer.cancel()
        held.timer = held.expires = None

    # -- loading -------------------------------------------------------------------------------------------

    def _settled(self, held: Held, task: asyncio.Task[None]) -> None:
        """The end of a load, whoever still waits for it."""
        if task.cancelled() or task.exception() is not None:
            self._forget(held)
        else:
            self._rest(held)

    async def _load(self, held: Held) -> None:
        """Raises InvalidRequest for a model that cannot be loaded as it is, EngineDead where it has no room."""
        offer = held.offer
        try:
            async with self._one_load:
                options = await asyncio.to_thread(offer.options)
                free, others = await self._make_room(held, options)
                options, held.reserved = self._room.sized(offer, options, free, others)
                front = await self._launch(options)
                held.serving, held.used = Serving(front, self.settings, self.quotas, offer.entry), time.monotonic()
        except (ModelFileError, UnsupportedModel, ConfigError) as error:
            raise InvalidRequest(f"{offer.name} cannot be loaded: {error.message}", error.hint, "model") from error
        except KvasirError:
            raise
        except Exception as error:
            log.exception("%s could not be loaded", offer.name)
            raise EngineDead(f"{offer.name} could not be loaded", "the server's log says why") from error

    async def _make_room(self, held: Held, options: EngineOptions) -> tuple[int | None, int]:
        """Unloads idle models, the one first that was leased least recently, until there is room. Returns the bytes
        that are free (None where that is not known) and how many models are left. Raises EngineDead."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        need = sum(needed(held.offer, options))
        while True:
            self._freed.clear()
            others = [other for other in self._all() if other.serving is not None]
            free = self._room.free(other.reserved for other in others)
            if len(others) < self._max_loaded and (free is None or need <= free):
                return free, len(others)
            hopeless = free is not None and need > free + sum(other.reserved for other in others)
            idle = [] if hopeless or not held.leases else [other for other in others if other.idle]
            if idle:
                self._begin_leaving(min(idle, key=lambda other: other.used))
            if hopeless or not held.leases or not await self._wait_freed(until - loop.time()):
                self._forget(held)
                raise self._no_room(held.offer, need, free, len(others))

    def _all(self) -> list[Held]:
        return [*self._held.values(), *self._leaving]

    async def _wait_freed(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._freed.wait(), max(0.0, seconds))
        except TimeoutError:
            return False
        return True

    def _no_room(self, offer: Offer, need: int, free: int | None, others: int) -> EngineDead:
        if others >= self._max_loaded:
            problem = f"{others} models are answering, and no more may be loaded at once"
            return EngineDead(f"{offer.name} is not loaded: {problem}", "try again later, or raise --max-loaded-models")
        room = f"it takes about {need / 2**30:.1f} GiB, and {(free or 0) / 2**30:.1f} GiB are free"
        return EngineDead(f"{offer.name} is not loaded: {room}", "free memory, or use a smaller or quantized model")

    # -- unloading -----------------------------------------------------------------------------------------

    def _begin_leaving(self, held: Held) -> None:
        """It is leased no more; it goes now, or when its last lease ends."""
        self._stop_timer(held)
        held.leaving = True
        if self._held.get(held.offer.name) is held:
            del self._held[held.offer.name]
            self._leaving.add(held)
        if held.idle:
            self._end_of(held)

    def _end_of(self, held: Held) -> asyncio.Task[None]:
        """The end of a model, which begins now unless it has begun."""
        if held.ending is None:
            held.ending = asyncio.ensure_future(self._leave(held))
        return held.ending

    async def _leave(self, held: Held) -> None:
        self._stop_timer(held)
        if held.serving is not None:
            try:
                await held.serving.front.stop()
            except Exception:
                log.exception("%s could not be unloaded cleanly", held.offer.name)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        self._leaving.discard(held)
        if self._held.get(held.offer.name) is held:
            del self._held[held.offer.name]
        self._freed.set()
