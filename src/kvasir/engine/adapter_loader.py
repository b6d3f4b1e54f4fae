"""Loads adapters beside the steps, on a thread of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from kvasir.sched.adapters import AdapterPool
from kvasir.types import ModelInfo


class Packs(Protocol):
    """What packs adapters: a runner."""

    def pack_adapter(self, path: str, content: str) -> Any: ...


class AdapterLoader:
    """A `sched.adapters.Loader`: reads and packs one adapter at a time."""

    def __init__(self, runner: Packs):
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "kvasir-adapters")

    def begin(self, path: str, content: str) -> Future[Any]:
        return self._thread.submit(self._runner.pack_adapter, path, content)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


def make_adapters(runner: Packs, info: ModelInfo, most_held: int = 0) -> AdapterPool:
    """The adapters in memory of a runner. most_held: see `AdapterPool`."""
    loader = AdapterLoader(runner) if info.max_adapters else None
    return AdapterPool(loader, info.max_adapters, info.adapter_bytes, most_held)
