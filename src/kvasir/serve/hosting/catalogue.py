"""The models of a server and the engines that serve them.

A route takes a lease of the model that its request names, and holds it until its response is written; a leased model
stays loaded.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath

from starlette.requests import Request as HTTPRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.engine.client import ASLEEP, Sleeps
from kvasir.engine.front import Front
from kvasir.errors import ConfigError, EngineDead, InvalidRequest, ModelNotFound, quoted
from kvasir.serve.auth.keys import Key
from kvasir.serve.auth.quota import Quotas
from kvasir.serve.auth.scopes import may_manage
from kvasir.serve.auth.sharing import SharingQuotas
from kvasir.serve.hosting.adapters import AdapterFolders, split_name
from kvasir.serve.hosting.offers import Offer
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.settings import ServeSettings
from kvasir.statistics import EngineStats
from kvasir.store.entry import ModelEntry
from kvasir.store.store import ModelStore

ROWS_SECONDS = 2.0  # for an engine to report how much it computes at once


@dataclass(frozen=True, slots=True)
class Card:
    """A model as listings show it, or an adapter. created: seconds since 1970. root: the first of its names, or the
    last part of an adapter's path. max_model_len: tokens; None if unknown. offer: what is known of the model without an
    engine. parent: the model of an adapter."""

    name: str
    created: int
    root: str
    max_model_len: int | None = None
    offer: Offer | None = None
    parent: str | None = None

    def of(self, path: str, name: str) -> Card:
        """The card of an adapter of this model. path: of its files."""
        return replace(self, name=name, root=PurePath(path).name, parent=self.root)


class Catalogue(ABC):
    """All methods are called on the event loop of the server.

    settings, quotas: of the whole server, for all models. store: source of the models; None for a server of given
    models.
    """

    store: ModelStore | None = None

    def __init__(
        self,
        settings: ServeSettings,
        clock: Callable[[], int] = time.monotonic_ns,
        quotas: Quotas | None = None,
    ):
        """clock: nanoseconds, for the limits of keys. quotas: those of another process, which counts."""
        self.settings = settings
        self.folders = AdapterFolders(settings.lora_dirs, settings.lora_resolve)
        self.quotas = quotas or _quotas(settings, clock)

    @abstractmethod
    async def start(self) -> None:
        """Starts the catalogue. Raises KvasirError."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends all engines; idempotent."""

    @abstractmethod
    async def cards(self) -> Sequence[Card]:
        """All models that requests may name."""

    @abstractmethod
    async def means(self, name: str, *, loads: bool = False) -> tuple[str, str]:
        """(model, adapter) that a name means; adapter is "" for the model itself. loads: an adapter that names resolve
        to is loaded. Raises ModelNotFound, or InvalidRequest for an adapter that several models have."""

    @abstractmethod
    def loaded(self) -> Sequence[Serving]:
        """The models that have an engine at present."""

    @abstractmethod
    def lease(
        self, name: str | None, keep_alive: float | None = None, *, owner: str = "", manages: bool = True
    ) -> AbstractAsyncContextManager[Serving]:
        """Leases the model of that name, loading it if needed; None: the only model. keep_alive: seconds for which it
        stays loaded after the owner's last lease; below 0 for ever; None: unchanged, initially the server's default.
        manages: keep_alive applies to all owners. Raises ModelNotFound, InvalidRequest, EngineDead."""

    @abstractmethod
    async def sleep(self, name: str | None, drain: float) -> None:
        """Frees the memory of the model of that name, of all loaded ones for None; leases raise EngineAsleep until
        `wake_up`. Requests under way have `drain` seconds. Raises ModelNotFound, InvalidRequest if the engine cannot
        sleep, EngineDead."""

    @abstractmethod
    async def wake_up(self, name: str | None) -> None:
        """Loads the model again, or all that were put to sleep. Raises ModelNotFound, KvasirError if it cannot be
        loaded."""

    @abstractmethod
    async def is_sleeping(self, name: str | None) -> bool:
        """Whether the model of that name was put to sleep, or any for None. Raises ModelNotFound."""

    async def rows(self) -> int:
        """How many choices the engines compute at once at present; those that do not answer count as none."""
        asked = (asyncio.wait_for(serving.front.stats(), ROWS_SECONDS) for serving in self.loaded())
        found = await asyncio.gather(*asked, return_exceptions=True)
        return sum(stats.max_rows for stats in found if isinstance(stats, EngineStats))

    def expires(self, serving: Serving) -> float | None:
        """When a loaded model will be unloaded, in seconds since 1970; None: no time is set."""
        return None

    @abstractmethod
    async def card(self, name: str) -> Card:
        """The model or adapter of that name. Raises ModelNotFound."""


def _quotas(settings: ServeSettings, clock: Callable[[], int]) -> Quotas:
    if settings.routers > 1:
        return SharingQuotas(settings.all_keys, settings.routers, clock)
    return Quotas(settings.all_keys, clock)


class OneModel(Catalogue):
    """A server of a single model, loaded from start to end."""

    def __init__(
        self,
        front: Front,
        settings: ServeSettings,
        clock: Callable[[], int] = time.monotonic_ns,
        entry: ModelEntry | None = None,
        quotas: Quotas | None = None,
    ):
        super().__init__(settings, clock, quotas)
        self._serving = Serving(front, settings, self.quotas, entry)

    async def start(self) -> None:
        front = self._serving.front
        await front.start()
        if taken := next((info.name for info in front.adapters.known if info.name in self._serving.names), None):
            await front.stop()
            raise ConfigError(f"the model and an adapter are both named {quoted(taken)}", "name the adapter otherwise")

    async def stop(self) -> None:
        await self._serving.front.stop()

    async def cards(self) -> Sequence[Card]:
        own = [self._own(name) for name in self._serving.names]
        return [*own, *(own[0].of(one.path, one.name) for one in self._serving.front.adapters.selected)]

    async def card(self, name: str) -> Card:
        model, adapter = await self.means(name)
        own, adapters = self._own(model), self._serving.front.adapters
        return own.of(adapters.need(adapter).path, name) if adapter else own

    def _own(self, name: str) -> Card:
        serving = self._serving
        return Card(name, serving.created, serving.names[0], serving.front.info.max_model_len)

    async def means(self, name: str, *, loads: bool = False) -> tuple[str, str]:
        names, front = self._serving.names, self._serving.front
        if name in names:
            return name, ""
        for model, adapter in ((names[0], name), split_name(name)):
            if model not in names:
                continue
            if front.adapters.find(adapter) or (loads and await self.folders.ensure(front, adapter)):
                return model, adapter
        plain = name.removesuffix(":latest")  # Ollama's clients add it
        if plain in names:
            return plain, ""
        served = [*names, *(option.name for option in front.adapters.selected)]
        raise ModelNotFound(f"the model {name[:200]!r} does not exist", f"served: {listed(served)}", "model")

    def loaded(self) -> Sequence[Serving]:
        return (self._serving,)

    async def sleep(self, name: str | None, drain: float) -> None:
        await (await self._sleeps(name)).sleep(drain)

    async def wake_up(self, name: str | None) -> None:
        await (await self._sleeps(name)).wake_up()

    async def is_sleeping(self, name: str | None) -> bool:
        if name is not None:
            await self.means(name)
        return self._serving.front.engine.state.status == ASLEEP

    async def _sleeps(self, name: str | None) -> Sleeps:
        """The engine. Raises ModelNotFound, InvalidRequest."""
        if name is not None:
            await self.means(name)
        engine = self._serving.front.engine
        if not isinstance(engine, Sleeps):
            raise InvalidRequest("this engine cannot sleep", "end the server instead")
        return engine

    @asynccontextmanager
    async def lease(
        self, name: str | None, keep_alive: float | None = None, *, owner: str = "", manages: bool = True
    ) -> AsyncIterator[Serving]:
        if name is not None and name not in self._serving.names:
            await self.means(name)
        yield self._serving


def listed(names: Sequence[str], most: int = 8) -> str:
    """The first of some names, for an error."""
    shown = ", ".join(map(repr, names[:most])) or "nothing"
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


class Leases:
    """ASGI middleware: releases the leases of a request after its response is written."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        async with AsyncExitStack() as leases:
            scope.setdefault("state", {})["leases"] = leases
            await self.app(scope, receive, send)


def catalogue_of(request: HTTPRequest) -> Catalogue:
    return request.app.state.catalogue


async def serving_of(
    request: HTTPRequest,
    name: str | None,
    keep_alive: float | None = None,
    *,
    adapter: str | None = None,
    param: str = "model",
) -> Serving:
    """The model that a request names, leased until its response is written, with the adapter of that name. adapter:
    what another field, `param`, names. Raises as `Catalogue.lease`, and InvalidRequest for two different adapters."""
    state = request.scope["state"]
    leases: AsyncExitStack = state["leases"]
    key: Key | None = state.get("key")
    catalogue = catalogue_of(request)
    model, named = (None, "") if name is None else await catalogue.means(name, loads=True)
    lease = catalogue.lease(
        model, keep_alive, owner=key.name if key else "", manages=keep_alive is None or may_manage(request)
    )
    serving = await leases.enter_async_context(lease)
    if named:
        await catalogue.folders.ensure(serving.front, named)
        serving = serving.adapted(named, name)
    return await adapted(request, serving, adapter, param)


async def adapted(request: HTTPRequest, serving: Serving, adapter: str | None, param: str) -> Serving:
    """The model with the adapter that a field, `param`, names; None: unchanged. Raises InvalidRequest, also if the
    model's name means another adapter."""
    if not adapter:
        return serving
    if named := serving.chosen:
        if named[0].name != adapter:
            message = f"two adapters: {quoted(named[0].name)} and {quoted(adapter)}"
            raise InvalidRequest(message, "name one of them", param=param)
        return serving
    await catalogue_of(request).folders.ensure(serving.front, adapter)
    return serving.adapted(adapter, param=param)


async def loaded_of(request: HTTPRequest, name: str | None) -> Serving:
    """The loaded model of this name, or the first loaded one; never loads a model. Raises ModelNotFound, EngineDead."""
    if serving := await loaded_as(catalogue_of(request), name):
        return serving
    raise EngineDead("no model is loaded", "send a request that names one first")


async def loaded_as(catalogue: Catalogue, name: str | None) -> Serving | None:
    """The same, None if it is not loaded. Raises ModelNotFound."""
    model, adapter = (None, "") if name is None else await catalogue.means(name)
    found = next((serving for serving in catalogue.loaded() if model is None or model in serving.names), None)
    return found.adapted(adapter, name) if found and adapter else found
