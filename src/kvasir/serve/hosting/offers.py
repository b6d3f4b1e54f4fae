"""The models that a multi-model server may load: those of the store, or those given at its start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from kvasir.adapters import AdapterOption
from kvasir.config import EngineOptions
from kvasir.errors import InvalidRequest
from kvasir.store.entry import Details, ModelEntry
from kvasir.store.store import ModelStore


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that may be loaded. identity: changes whenever loading would give a different model. size: bytes of its
    weight files. options: returns the options to load it with; may raise KvasirError. created: seconds since 1970.
    adapters: those that the server gives it, which are among these options."""

    name: str
    identity: str
    size: int
    details: Details
    options: Callable[[], EngineOptions]
    entry: ModelEntry | None = None
    created: int = 0
    adapters: tuple[AdapterOption, ...] = ()


class Offers(Protocol):
    async def all(self) -> Sequence[Offer]: ...

    async def find(self, *names: str) -> list[Offer | None]:
        """The offers of these names (None where there is none), all as of one moment."""
        ...


class StoreOffers:
    """All models of a store, reread on each call, in threads. base: the options of all engines."""

    def __init__(self, store: ModelStore, base: EngineOptions):
        self._store = store
        self._base = base

    async def all(self) -> Sequence[Offer]:
        return await asyncio.to_thread(
            lambda: [self._offer(entry) for entry in self._store.list() if not entry.is_adapter]
        )

    async def find(self, *names: str) -> list[Offer | None]:
        return await asyncio.to_thread(lambda: [self._find(name) for name in names])

    def _find(self, name: str) -> Offer | None:
        entry = self._store.find(name)
        return None if entry is None or entry.is_adapter else self._offer(entry)

    def _offer(self, entry: ModelEntry) -> Offer:
        return offer_of(self._store, entry, self._base)


def offer_of(store: ModelStore, entry: ModelEntry, base: EngineOptions) -> Offer:
    details = entry.details
    if entry.draft:  # its keys and values are in the same blocks
        more = entry.draft.details.kv_bytes_per_token
        details = replace(details, kv_bytes_per_token=details.kv_bytes_per_token + more)
    return Offer(
        entry.name,
        " ".join((entry.digest, *(weights.path for weights in entry.all_weights))),
        entry.size,
        details,
        partial(store.options, entry, base),
        entry,
        int(entry.created),
    )


class GivenOffers:
    """A fixed set of models by name. Raises InvalidRequest for a name that occurs twice."""

    def __init__(self, offers: Sequence[Offer]):
        self._offers = {offer.name: offer for offer in offers}
        if len(self._offers) < len(offers):
            raise InvalidRequest("the same model is given twice", "give each model once", param="model")

    async def all(self) -> Sequence[Offer]:
        return list(self._offers.values())

    async def find(self, *names: str) -> list[Offer | None]:
        return [self._find(name) for name in names]

    def _find(self, name: str) -> Offer | None:
        spellings = (name, name.removesuffix(":latest"), f"{name}:latest")
        return next((self._offers[s] for s in spellings if s in self._offers), None)
