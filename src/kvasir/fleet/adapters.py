"""The adapters of a fleet: one table of names, from which requests are resolved before they are routed. Each replica
has the same names, so that a pinned adapter is in the memory of all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from kvasir.engine.adapters import AdapterNames
from kvasir.engine.client import Engine
from kvasir.errors import EngineDead, InvalidRequest, KvasirError, quoted
from kvasir.types import AdapterInfo

log = logging.getLogger("kvasir.fleet")


class FleetAdapters:
    """ready: the engines that answer at present. An engine that is away gets what it lacks from `share` when it is
    back."""

    def __init__(self, ready: Callable[[], Sequence[Engine]]):
        self.names = AdapterNames()
        self._ready = ready
        self._changing = asyncio.Lock()

    async def load(self, name: str, path: str, replaces: bool, pinned: bool) -> AdapterInfo:
        """Loads an adapter into all engines or into none; see `Engine.load_adapter`."""
        async with self._changing:
            self.names.check(name, replaces)
            engines = self._ready()
            calls = (engine.load_adapter(name, path, replace=True, pinned=pinned) for engine in engines)
            results = await asyncio.gather(*calls, return_exceptions=True)
            for error in (r for r in results if isinstance(r, BaseException) and not isinstance(r, EngineDead)):
                await self._restore(engines, name)
                raise error
            found = [r for r in results if isinstance(r, AdapterInfo)]
            if not found:
                raise EngineDead("no replica can load an adapter at present", "try again later")
            if len({info.content for info in found}) > 1:
                await self._restore(engines, name)
                raise InvalidRequest(
                    f"the replicas read different contents for adapter {quoted(name)}",
                    "its files changed while they were read; load it again",
                    "lora_path",
                )
            self.names.put(found[0])
            return found[0]

    async def unload(self, name: str) -> None:
        """See `Engine.unload_adapter`."""
        async with self._changing:
            self.names.remove(name)
            for engine in self._ready():
                await self._unload(engine, name)

    async def share(self, engine: Engine) -> None:
        """Gives an engine the names that it lacks, and takes those that are gone. An adapter that the engine cannot
        load, because its files have changed, is left out there: requests bring what they were resolved to."""
        async with self._changing:
            has = {info.name: info for info in engine.adapters}
            for name in has.keys() - {info.name for info in self.names.all}:
                await self._unload(engine, name)
            for info in self.names.all:
                if name_of(has.get(info.name)) != name_of(info):
                    await self._load_again(engine, info)

    async def _restore(self, engines: Sequence[Engine], name: str) -> None:
        """Takes back a load: the engines have the adapter of before, or none."""
        before = next((info for info in self.names.all if info.name == name), None)
        for engine in engines:
            if before is None:
                await self._unload(engine, name)
            else:
                await self._load_again(engine, before)

    async def _load_again(self, engine: Engine, info: AdapterInfo) -> None:
        try:
            await engine.load_adapter(info.name, info.path, replace=True, pinned=info.pinned)
        except KvasirError as error:
            log.warning("a replica cannot load adapter %s: %s", quoted(info.name), error)

    async def _unload(self, engine: Engine, name: str) -> None:
        """An engine that has gone is left out."""
        if any(info.name == name for info in engine.adapters):
            with contextlib.suppress(EngineDead):
                await engine.unload_adapter(name)


def name_of(info: AdapterInfo | None) -> tuple[str, str, bool] | None:
    """What two engines must agree in."""
    return info and (info.name, info.content, info.pinned)
