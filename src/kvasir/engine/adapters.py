"""The names of an engine's adapters. They live beside its handle, in the caller's process: the core knows adapters by
their contents, as requests bring them, so a restarted engine needs no names."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace

from kvasir.errors import InvalidRequest, ModelNotFound, quoted
from kvasir.inputs import Adapter
from kvasir.statistics import EngineStats
from kvasir.types import AdapterInfo, ModelInfo, Request

NAMED = 8  # names that an error message lists


class AdapterNames:
    """The adapters that requests may name, in the order in which their names were first loaded."""

    def __init__(self) -> None:
        self._named: dict[str, AdapterInfo] = {}

    @property
    def all(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._named.values())

    @property
    def pinned(self) -> list[AdapterInfo]:
        return [info for info in self._named.values() if info.pinned]

    def __len__(self) -> int:
        return len(self._named)

    def check(self, name: str, replaces: bool) -> None:
        """Raises InvalidRequest for a name that cannot be loaded."""
        if not name or not name.isprintable():
            raise InvalidRequest(f"{quoted(name)} is no name for an adapter", "use printable characters", "lora_name")
        if name in self._named and not replaces:
            raise InvalidRequest(
                f"adapter {quoted(name)} is loaded already",
                "unload it first, or replace it (load_inplace)",
                "lora_name",
            )

    def put(self, info: AdapterInfo) -> str:
        """Adds an adapter, or replaces that of its name. Returns a content hash that has lost its last name or pin by
        that, or ""."""
        before = self._named.get(info.name)
        self._named[info.name] = info
        return self._lost(before) if before else ""

    def remove(self, name: str) -> str:
        """Removes a name; returns as `put`. Raises ModelNotFound."""
        if name not in self._named:
            raise self._unknown(name, "lora_name")
        return self._lost(self._named.pop(name))

    def _lost(self, before: AdapterInfo) -> str:
        same = [info for info in self._named.values() if info.content == before.content]
        lost = any(info.pinned for info in same) < before.pinned or not same
        return before.content if lost else ""

    def resolve(self, request: Request) -> Request:
        """The request with the contents of the adapters that it names, without those of scale 0. An adapter that has a
        content already keeps it: another engine has resolved its name. Raises ModelNotFound, or InvalidRequest for a
        scale that the adapter does not take."""
        if not request.adapters:
            return request
        found = tuple(self._resolve(adapter) for adapter in request.adapters if adapter.scale)
        return replace(request, adapters=found)

    def _resolve(self, adapter: Adapter) -> Adapter:
        if adapter.content:
            return adapter
        info = self._named.get(adapter.name)
        if info is None:
            raise self._unknown(adapter.name, "adapter")
        if info.fixed_scale and adapter.scale != 1.0:
            raise InvalidRequest(
                f"adapter {quoted(adapter.name)} with the scale {adapter.scale:g}",
                "it scales whole rows (DoRA), which allows only the scale 1",
                "scale",
            )
        return replace(adapter, scale=float(adapter.scale), content=info.content, path=info.path, nbytes=info.nbytes)

    def _unknown(self, name: str, param: str) -> ModelNotFound:
        names = ", ".join(map(quoted, list(self._named)[:NAMED])) + (" ..." if len(self._named) > NAMED else "")
        known = f"loaded: {names}" if names else "no adapters are loaded; load it first"
        return ModelNotFound(f"adapter {quoted(name)} is not loaded", known, param)


class Adapters:
    """Loads and unloads the adapters of an engine.

    read(path): a description of the adapter at a path, made by the engine. pin(info), drop(content): messages to the
    core, in order with the requests; see wire.PinAdapter and wire.DropAdapter."""

    def __init__(
        self,
        read: Callable[[str], Awaitable[AdapterInfo]],
        pin: Callable[[AdapterInfo], object],
        drop: Callable[[str], object],
    ):
        self.names = AdapterNames()
        self._read, self._pin, self._drop = read, pin, drop
        self._changing = asyncio.Lock()

    async def load(self, name: str, path: str, replaces: bool, pinned: bool, model: ModelInfo) -> AdapterInfo:
        """See `Engine.load_adapter`."""
        async with self._changing:  # what was checked holds until the name is entered
            self.names.check(name, replaces)
            if not model.max_adapters:
                raise InvalidRequest("this engine takes no adapters", "start it with --max-loras", "lora_name")
            info = replace(await self._read(path), name=name, pinned=pinned)
            if pinned:
                self._refuse_pinned(info, model)
            lost = self.names.put(info)
            if lost:
                self._drop(lost)
            if pinned:
                self._pin(info)
            return info

    def _refuse_pinned(self, info: AdapterInfo, model: ModelInfo) -> None:
        pinned = {one.content: one.nbytes for one in (*self.names.pinned, info) if one.name != info.name}
        pinned[info.content] = info.nbytes
        if len(pinned) > model.max_adapters or sum(pinned.values()) > model.adapter_bytes:
            raise InvalidRequest(
                f"{len(pinned)} pinned adapters of {sum(pinned.values())} bytes do not fit: the memory holds "
                f"{model.max_adapters} adapters and {model.adapter_bytes} bytes",
                "do not pin it, or raise --max-loras and --lora-memory",
                "pinned",
            )

    def pin_again(self) -> None:
        """Sends a new core the pinned adapters."""
        for info in self.names.pinned:
            self._pin(info)

    async def unload(self, name: str) -> None:
        """See `Engine.unload_adapter`."""
        async with self._changing:
            if lost := self.names.remove(name):
                self._drop(lost)


class TakesAdapters(ABC):
    """The part of an engine that deals with adapters. Sets `_adapters` when it is created."""

    _adapters: Adapters

    @property
    @abstractmethod
    def info(self) -> ModelInfo: ...

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self._adapters.names.all

    async def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        return await self._adapters.load(name, path, replace, pinned, self.info)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(name)

    def _named(self, stats: EngineStats) -> EngineStats:
        """The core's statistics with the number of names, of which the core knows nothing."""
        return replace(stats, adapters_registered=len(self._adapters.names))
