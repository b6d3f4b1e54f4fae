"""LaterTier: a tier that opens once the weights are identified.

A tier that outlives its process, or that other processes read, names the weights by their content. The hash of a large
file that was not pulled takes seconds, once: the engine serves meanwhile, and the tier is empty and takes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from kvasir.errors import ConfigError
from kvasir.kv.tiers.block import Name, StoredBlock, StoreFacts
from kvasir.kv.tiers.connector import Bytes, Failed, KVConnector
from kvasir.statistics import TierStats

log = logging.getLogger("kvasir.kv")


class Identity(Protocol):
    """What an engine's weights are. value: the same for equal weights, wherever they lie; None while unknown."""

    @property
    def value(self) -> str | None: ...

    def close(self) -> None:
        """Stops finding it out."""
        ...


class LaterTier:
    """A KVConnector that is the tier of `open`, once `identity` is known; before that it has nothing and keeps nothing.

    name: of that tier. facts: without a model. open: makes the tier, which this one owns, from the facts with the
    model. If it raises a ConfigError, it is logged, and the tier stays empty. Thread-safe.
    """

    def __init__(self, name: str, facts: StoreFacts, identity: Identity, open: Callable[[StoreFacts], KVConnector]):
        self.name = name
        self._facts = facts
        self._identity = identity
        self._open: Callable[[StoreFacts], KVConnector] | None = open
        self._tier: KVConnector | None = None
        self._lock = threading.Lock()
        self._ending = False

    @property
    def facts(self) -> StoreFacts:
        """With the model, once that is known."""
        tier = self.opened()
        return tier.facts if tier else self._facts

    def opened(self) -> KVConnector | None:
        """The tier, which this call opens if the identity has become known; None before."""
        if self._tier is None and self._open is not None and (model := self._identity.value) is not None:
            with self._lock:
                self._make(replace(self._facts, model=model))
        return self._tier

    def _make(self, facts: StoreFacts) -> None:
        make, self._open = self._open, None
        if make is None:  # another thread was first
            return
        try:
            tier = make(facts)
        except ConfigError as error:
            log.warning("the %s tier stays empty: %s", self.name, error)
            return
        if self._ending:
            tier.ending()
        self._tier = tier

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        """See KVConnector.ask."""
        tier = self.opened()
        return tier is None or tier.ask(keys, group, timeout)

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        """See KVConnector.has."""
        tier = self.opened()
        return tier.has(keys, group) if tier else 0

    def read_seconds(self, names: Sequence[Name]) -> float:
        """See KVConnector.read_seconds."""
        return self._tier.read_seconds(names) if self._tier else 0.0

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        """See KVConnector.wants."""
        tier = self.opened()
        return tier is not None and tier.wants(key, group, pace, depth)

    def start_load(self, block: StoredBlock, group: int = 0) -> int:
        """See KVConnector.start_load. Only of a part that the tier has had."""
        return self._must().start_load(block, group)

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        """See KVConnector.poll."""
        return self._must().poll(ticket, timeout)

    def cancel(self, ticket: int) -> None:
        """See KVConnector.cancel."""
        self._must().cancel(ticket)

    def _must(self) -> KVConnector:
        assert self._tier is not None, "nothing is loaded from a tier that has not opened"
        return self._tier

    def save(self, block: StoredBlock, group: int, payload: Bytes) -> bool:
        """See KVConnector.save."""
        tier = self.opened()
        return tier is not None and tier.save(block, group, payload)

    def ending(self) -> None:
        """See KVConnector.ending."""
        with self._lock:
            self._ending = True
        if self._tier:
            self._tier.ending()

    def stats(self) -> TierStats:
        """See KVConnector.stats."""
        return self._tier.stats() if self._tier else TierStats()

    def each(self) -> dict[str, TierStats]:
        """See KVConnector.each."""
        return self._tier.each() if self._tier else {self.name: TierStats()}

    def close(self, timeout: float = 5.0) -> None:
        """Stops identifying the weights, and closes the tier."""
        with self._lock:
            self._open = None
        self._identity.close()
        if self._tier:
            self._tier.close(timeout)
