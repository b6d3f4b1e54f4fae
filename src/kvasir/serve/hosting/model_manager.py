"""A server of several models: each is loaded on its first request, into an engine of its own, and unloaded after a time
without leases or when another model needs its place.

    absent -> waiting -> loading -> loaded: leased <-> idle -> leaving -> absent
                 |          |                   |                ^
                 +----------+-> failed          +-- changed -----+   (when its last lease ends)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext

from kvasir.adapters import AdapterOption, selected_by_name
from kvasir.config import EngineOptions
from kvasir.engine.front import Front
from kvasir.errors import (
    ConfigError,
    EngineAsleep,
    EngineDead,
    InvalidRequest,
    KvasirError,
    ModelFileError,
    ModelNotFound,
    UnsupportedModel,
    quoted,
)
from kvasir.serve.hosting.adapters import split_name
from kvasir.serve.hosting.admission_queue import AdmissionQueue
from kvasir.serve.hosting.catalogue import Card, Catalogue, listed
from kvasir.serve.hosting.held import FOREVER, Held
from kvasir.serve.hosting.memory_budget import MemoryBudget
from kvasir.serve.hosting.offers import Offer, Offers
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.settings import ServeSettings
from kvasir.store.store import ModelStore

log = logging.getLogger("kvasir.serve")

PLACE_SECONDS = 60.0  # seconds for which a model waits for the place of another that is in use

# Starts a front. Raises KvasirError; if cancelled, it cleans up.
Launch = Callable[[EngineOptions], Awaitable[Front]]


class ModelManager(Catalogue):
    """keep_alive: seconds for which a model stays loaded after its last lease, below 0 for ever. max_loaded: maximum
    number of loaded models. available: bytes of memory that the host has free, None if unknown."""

    def __init__(
        self,
        offers: Offers,
        launch: Launch,
        settings: ServeSettings,
        *,
        store: ModelStore | None = None,
        keep_alive: float = 300.0,
        max_loaded: int = 3,
        available: Callable[[], int | None] = lambda: None,
        patience: float = PLACE_SECONDS,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        super().__init__(settings, clock)
        self.store = store
        self._offers = offers
        self._launch = launch
        self._keep_alive = keep_alive
        self._budget = MemoryBudget(available, max_loaded)
        self._queue = AdmissionQueue(self._budget, max_loaded, patience, lambda: self.held, self._begin_leaving)
        self._held: dict[str, Held] = {}  # by name: the models that may be leased
        self._leaving: set[Held] = set()
        self._asleep: dict[str, bool] = {}  # by name: whether it was loaded when it was put to sleep
        self._adapters: dict[str, dict[str, AdapterOption]] = {}  # by model: what was loaded, as its last engine has it
        self._one_look = asyncio.Lock()
        self._one_load = asyncio.Lock()
        self._end: asyncio.Future[None] | None = None

    async def start(self) -> None:
        offers = await self._offers.all()
        self._adapters = {offer.name: {one.name: one for one in offer.adapters} for offer in offers if offer.adapters}
        if taken := next((offer.name for offer in offers if self._with_adapter(offer.name)), None):
            raise ConfigError(f"a model and an adapter are both named {quoted(taken)}", "name the adapter otherwise")

    async def stop(self) -> None:
        if self._end is None:
            self._end = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._end)

    async def _stop(self) -> None:
        everything = self.held
        for held in everything:
            held.loading.cancel()
        await asyncio.gather(*(held.loading for held in everything), return_exceptions=True)
        await asyncio.gather(*(self._end_of(held) for held in everything))

    # -- models --------------------------------------------------------------------------------------------

    async def cards(self) -> Sequence[Card]:
        offers = await self._offers.all()
        return [*map(self._card, offers), *(card for offer in offers for card in self._adapter_cards(offer))]

    def _adapter_cards(self, offer: Offer) -> list[Card]:
        """The adapters that requests select by name, of a model that has been loaded."""
        own, mine = self._card(offer), self._adapters.get(offer.name, {})
        chosen = selected_by_name(mine)
        return [own.of(option.path, self._full_name(offer.name, option.name)) for option in chosen]

    def _full_name(self, model: str, adapter: str) -> str:
        """The name of an adapter: its own if no other model has one of that name."""
        return adapter if len(self._with_adapter(adapter)) == 1 else f"{model}:{adapter}"

    def _with_adapter(self, adapter: str) -> list[str]:
        """The models that have an adapter of this name."""
        return [model for model, mine in self._adapters.items() if adapter in mine]

    async def card(self, name: str) -> Card:
        model, adapter = await self.means(name)
        own = self._card(await self._offer(model))
        if not adapter:
            return own
        option = self._adapters.get(own.name, {}).get(adapter)
        return own.of(option.path if option else adapter, name)

    async def means(self, name: str, *, loads: bool = False) -> tuple[str, str]:
        model, adapter = split_name(name)
        itself, base = await self._offers.find(name, model)
        if itself is not None:
            return name, ""
        if base is not None and adapter:
            return model, adapter
        found = self._with_adapter(name)
        if len(found) > 1:
            hint = f"name it with its model: {listed([f'{model}:{name}' for model in found])}"
            raise InvalidRequest(f"{len(found)} models have an adapter {quoted(name)}", hint, param="model")
        if not found:
            raise await self._unknown(name)
        return found[0], name

    def _card(self, offer: Offer) -> Card:
        held = self._held.get(offer.name)
        known = offer.details.context_length or None
        length = held.serving.front.info.max_model_len if held and held.serving else known
        return Card(offer.name, offer.created, offer.name, length, offer)

    @property
    def held(self) -> list[Held]:
        """All models that are waiting, loading, loaded or leaving."""
        return [*self._held.values(), *self._leaving]

    @property
    def waiting(self) -> list[str]:
        """The names of the models that wait for a place, in order of arrival."""
        return [held.offer.name for held in self._queue.waiting]

    def loaded(self) -> Sequence[Serving]:
        return [held.serving for held in self._held.values() if held.serving is not None]

    def expires(self, serving: Serving) -> float | None:
        return next((held.expires for held in self._held.values() if held.serving is serving), None)

    async def _offer(self, name: str) -> Offer:
        [offer] = await self._offers.find(name)
        if offer is None:
            raise await self._unknown(name)
        return offer

    async def _unknown(self, name: str) -> ModelNotFound:
        shown = listed([card.name for card in await self.cards()])
        hint = f"served: {shown}" if self.store is None else f"run `kvasir pull` first; available: {shown}"
        return ModelNotFound(f"the model {name[:200]!r} does not exist", hint, "model")

    # -- sleep ---------------------------------------------------------------------------------------------

    async def sleep(self, name: str | None, drain: float) -> None:
        """A sleeping model is not loaded, so its memory is free for others."""
        names = [*self._held] if name is None else [(await self._offer(name)).name]
        there = [held for held in (self._held.get(one) for one in names) if held is not None]
        self._asleep |= {one: one in self._held or self._asleep.get(one, False) for one in names}
        deadline = time.monotonic() + drain
        for held in there:
            self._begin_leaving(held)
        while any(held in self._leaving and held.leases for held in there) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await asyncio.gather(*(held.loading for held in there), return_exceptions=True)
        await asyncio.gather(*(self._end_of(held) for held in there))

    async def wake_up(self, name: str | None) -> None:
        names = [*self._asleep] if name is None else [(await self._offer(name)).name]
        again = [one for one in names if self._asleep.pop(one, False)]
        await asyncio.gather(*map(self._load_again, again))

    async def _load_again(self, name: str) -> None:
        async with self.lease(name):
            pass

    async def is_sleeping(self, name: str | None) -> bool:
        return bool(self._asleep) if name is None else (await self._offer(name)).name in self._asleep

    # -- leases --------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(
        self, name: str | None, keep_alive: float | None = None, *, owner: str = "", manages: bool = True
    ) -> AsyncIterator[Serving]:
        held = await self._hold(name)
        try:
            serving = await self._loaded(held)
            if keep_alive is not None:
                held.wish(owner, keep_alive, manages)
            yield serving
        finally:
            held.leases -= 1
            held.rest(owner)
            self._rest(held)

    async def _loaded(self, held: Held) -> Serving:
        try:
            await asyncio.shield(held.loading)
        except asyncio.CancelledError:
            if held.loading.cancelled():
                raise EngineDead("the server is shutting down") from None
            raise
        assert held.serving is not None, "a load that does not raise has one"
        return held.serving

    async def _only(self) -> Offer:
        offers = await self._offers.all()
        if len(offers) != 1:
            names = ", ".join(repr(offer.name) for offer in offers[:3]) or "none yet"
            raise InvalidRequest(f"{len(offers)} models are available", f"name one: {names}", param="model")
        return offers[0]

    async def _hold(self, name: str | None) -> Held:
        """Leases the model, loaded or loading. One lookup runs at a time, so that no request acts on outdated
        offers."""
        async with self._one_look:
            offer = await self._only() if name is None else await self._offer(name)
            if offer.name in self._asleep:
                raise EngineAsleep(f"the model {offer.name!r} is asleep", "wake it with POST /wake_up")
            there = [*self._held]
            now = dict(zip(there, await self._offers.find(*there), strict=True)) | {offer.name: offer}
            held = self._held_of(offer, now)
            held.leases += 1
            self._stop_timer(held)
            return held

    def _held_of(self, offer: Offer, offers: Mapping[str, Offer | None]) -> Held:
        """The Held of an offer, created if needed. Models whose offer has changed, or whose engine has ended, leave
        when their leases end."""
        if self._end is not None:
            raise EngineDead("the server is shutting down")
        for held in list(self._held.values()):
            now = offers.get(held.offer.name)
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
        """Decides what happens to a model without leases: unload it, or start its keep_alive timer."""
        if held.leases:
            return
        self._queue.freed()
        if not held.idle:
            return
        left = max(held.until.values(), default=0.0) - time.monotonic()
        if held.leaving or left <= 0:
            self._begin_leaving(held)
        elif left < FOREVER / 2:
            held.timer = asyncio.get_running_loop().call_later(left, self._begin_leaving, held)
            held.expires = time.time() + left

    @staticmethod
    def _stop_timer(held: Held) -> None:
        if held.timer is not None:
            held.timer.cancel()
        held.timer = held.expires = None

    # -- loading -------------------------------------------------------------------------------------------

    def _settled(self, held: Held, task: asyncio.Task[None]) -> None:
        """Handles the end of a load, even if no request waits for it."""
        if task.cancelled() or task.exception() is not None:
            self._forget(held)
        else:
            if not held.leases:  # the request that started the load has left
                held.rest("")
            self._rest(held)

    async def _load(self, held: Held) -> None:
        """Loads the model. Raises InvalidRequest if it cannot be loaded as it is, EngineDead if there is no room for
        it."""
        offer = held.offer
        try:
            options = await asyncio.to_thread(offer.options)
            free, others = await self._queue.take(held, options)
            options, held.reserved = self._budget.sized(offer, options, free, others)
            # If the free memory is unknown here, each engine measures it at its start: one starts at a time.
            async with self._one_load if free is None else nullcontext():
                front = await self._launch(options)
            await self._keep_adapters(offer, front)
            held.serving, held.used = Serving(front, self.settings, self.quotas, offer.entry), time.monotonic()
        except (ModelFileError, UnsupportedModel, ConfigError) as error:
            raise InvalidRequest(f"{offer.name} cannot be loaded: {error.message}", error.hint, "model") from error
        except KvasirError:
            raise
        except Exception as error:
            log.exception("%s could not be loaded", offer.name)
            raise EngineDead(f"{offer.name} could not be loaded", "see the server's log") from error

    async def _keep_adapters(self, offer: Offer, front: Front) -> None:
        """Loads the adapters again that clients loaded before the model was unloaded, and unloads those that they
        unloaded."""
        before = self._adapters.get(offer.name, {})
        for option in offer.adapters:
            if option.name not in before:
                await front.adapters.unload(option.name)
        for option in before.values():
            if option.name not in front.adapters.options:
                try:
                    await front.adapters.load(option)
                except KvasirError as error:
                    log.warning("%s: the adapter %s is gone: %s", offer.name, option.name, error)
        self._adapters[offer.name] = front.adapters.options

    # -- unloading -----------------------------------------------------------------------------------------

    def _begin_leaving(self, held: Held) -> None:
        """Stops leasing the model; it is unloaded at once, or when its last lease ends."""
        self._stop_timer(held)
        held.leaving = True
        if self._held.get(held.offer.name) is held:
            del self._held[held.offer.name]
            self._leaving.add(held)
        if held.idle:
            self._end_of(held)

    def _end_of(self, held: Held) -> asyncio.Task[None]:
        """The task that unloads the model, started if it is not running."""
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
        self._queue.freed()
