"""The models of a server and the engines that serve them.

A route takes a lease of the model that its request names, and holds it until its response is written; a leased model
stays loaded.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request as HTTPRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.engine.front import Front
from kvasir.errors import EngineDead, ModelNotFound
from kvasir.serve.auth.keys import Key
from kvasir.serve.auth.quota import Quotas
from kvasir.serve.auth.scopes import may_manage
from kvasir.serve.hosting.offers import Offer
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.settings import ServeSettings
from kvasir.store.entry import ModelEntry
from kvasir.store.store import ModelStore


@dataclass(frozen=True, slots=True)
class Card:
    """A model as listings show it. created: seconds since 1970. root: the first of its names. max_model_len: tokens;
    None if unknown. offer: what is known of the model without an engine."""

    name: str
    created: int
    root: str
    max_model_len: int | None = None
    offer: Offer | None = None


class Catalogue(ABC):
    """All methods are called on the event loop of the server.

    settings, quotas: of the whole server, for all models. store: source of the models; None for a server of given
    models.
    """

    store: ModelStore | None = None

    def __init__(self, settings: ServeSettings, clock: Callable[[], int] = time.monotonic_ns):
        """clock: nanoseconds, for the limits of keys."""
        self.settings = settings
        self.quotas = Quotas(settings.all_keys, clock)

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
    def loaded(self) -> Sequence[Serving]:
        """The models that have an engine at present."""

    @abstractmethod
    def lease(
        self, name: str | None, keep_alive: float | None = None, *, owner: str = "", manages: bool = True
    ) -> AbstractAsyncContextManager[Serving]:
        """Leases the model of that name, loading it if needed; None: the only model. keep_alive: seconds for which it
        stays loaded after the owner's last lease; below 0 for ever; None: unchanged, initially the server's default.
        manages: keep_alive applies to all owners. Raises ModelNotFound, InvalidRequest, EngineDead."""

    def expires(self, serving: Serving) -> float | None:
        """When a loaded model will be unloaded, in seconds since 1970; None: no time is set."""
        return None

    async def card(self, name: str) -> Card:
        """The model of that name. Raises ModelNotFound."""
        cards = await self.cards()
        found = next((card for card in cards if card.name == name), None)
        if found is None:
            shown = ", ".join(repr(card.name) for card in cards[:3]) or "nothing"
            raise ModelNotFound(f"the model {name[:200]!r} does not exist", f"served: {shown}")
        return found


class OneModel(Catalogue):
    """A server of a single model, loaded from start to end."""

    def __init__(
        self,
        front: Front,
        settings: ServeSettings,
        clock: Callable[[], int] = time.monotonic_ns,
        entry: ModelEntry | None = None,
    ):
        super().__init__(settings, clock)
        self._serving = Serving(front, settings, self.quotas, entry)

    async def start(self) -> None:
        await self._serving.front.start()

    async def stop(self) -> None:
        await self._serving.front.stop()

    async def cards(self) -> Sequence[Card]:
        serving = self._serving
        length = serving.front.info.max_model_len
        return [Card(name, serving.created, serving.names[0], length) for name in serving.names]

    def loaded(self) -> Sequence[Serving]:
        return (self._serving,)

    @asynccontextmanager
    async def lease(
        self, name: str | None, keep_alive: float | None = None, *, owner: str = "", manages: bool = True
    ) -> AsyncIterator[Serving]:
        if name is not None:
            await self.card(name)
        yield self._serving


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


async def serving_of(request: HTTPRequest, name: str | None, keep_alive: float | None = None) -> Serving:
    """The model that a request names, leased until its response is written. Raises as `Catalogue.lease`."""
    state = request.scope["state"]
    leases: AsyncExitStack = state["leases"]
    key: Key | None = state.get("key")
    lease = catalogue_of(request).lease(
        name, keep_alive, owner=key.name if key else "", manages=keep_alive is None or may_manage(request)
    )
    return await leases.enter_async_context(lease)


async def loaded_of(request: HTTPRequest, name: str | None) -> Serving:
    """The loaded model of this name, or the first loaded one; never loads a model. Raises ModelNotFound, EngineDead."""
    catalogue = catalogue_of(request)
    if name is not None:
        await catalogue.card(name)
    for serving in catalogue.loaded():
        if name is None or name in serving.names:
            return serving
    raise EngineDead("no model is loaded", "send a request that names one first")
