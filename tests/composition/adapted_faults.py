"""Faults of adapters: see tests.composition.fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.composition.fault import fault, wrap


def joined(change: Callable) -> Callable:
    """A plant: what the adapters of a row become when it joins."""

    def plant(core: Any) -> None:
        @wrap(core.scheduler.adapters, "join")
        def join(given: Callable, seq: Any) -> tuple:
            return tuple(change(given(seq)))

    return plant


fault("a row has the adapter of another", ("adapter", "neighbours"), ("adapter: everything", "overlap"))(
    joined(lambda adapted: (one._replace(adapter=1) for one in adapted))
)
fault("an adapter's scale is lost", ("adapters summed",), ("adapters summed", "forced preemption", "qwen3-moe"))(
    joined(lambda adapted: (one._replace(scale=1.0) for one in adapted))
)
fault("the last of several adapters is lost", ("adapters summed",), ("adapters summed", "eager executor", "qwen3"))(
    joined(lambda adapted: adapted[:1])
)
fault(
    "an adapter begins one token late",
    ("adapter: from a later position",),
    ("adapter: from a later position", "steps of 29 tokens", "llama"),
    ("adapter: from a later position", "eager executor", "qwen3"),
)(joined(lambda adapted: (one._replace(start=one.start + 1) for one in adapted)))


@fault("an adapter that moved out is still there", ("adapter: little room",), ("adapter: little room", "tiny pool"))
def stays_installed(core: Any) -> None:
    installed = set()

    @wrap(core.runner, "set_adapter")
    def put(install: Callable, adapter: int, packed: Any) -> None:
        if adapter not in installed:
            install(adapter, packed)
        installed.add(adapter)


@fault("what the old content of a name left is found", ("adapter: reloaded",), ("adapter: reloaded", "gemma3"))
def by_name(core: Any) -> None:
    @wrap(core.scheduler, "_sequence")
    def sequence(make: Callable, request: Any, index: int) -> Any:
        made = make(request, index)
        made.content.namespace = repr([adapter.name for adapter in request.adapters]).encode()
        return made


@fault("an adapter changes what is cached before it begins", ("adapter: from a later position",), proof=True)
def whole_scope(core: Any) -> None:
    @wrap(core.scheduler, "_sequence")
    def sequence(make: Callable, request: Any, index: int) -> Any:
        named = tuple(replace(adapter, start=0) for adapter in request.adapters)
        made = make(request, index)
        made.content.namespace = repr(named).encode()
        return made
