"""How much memory the weights of a model's processes get, and whether they are streamed, before any weight is read."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.errors import ConfigError
from kvasir.layers.linear import Head, Linear

SHARE = 0.5  # of the free memory that weights take if they are streamed and the user has not said how much
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of the weights of one process. fixed: of those that always stay in memory. layers: of the matrices of each
    of its layers, which can be streamed."""

    fixed: int
    layers: tuple[int, ...]

    @property
    def all(self) -> int:
        """Bytes of all weights."""
        return self.fixed + sum(self.layers)

    @property
    def least(self) -> int:
        """Bytes that are in memory at least."""
        return self.fixed + max(self.layers, default=0)


def needs_of(model: Any, nbytes: int, sizes: Mapping[int, int]) -> Needs:
    """nbytes: of all weights of this process. sizes: of its matrices of each module, by the module's `id()`."""
    layers: Counter[int] = Counter()
    for module, (_, layer) in layer_modules(model).items():
        layers[layer] += sizes.get(module, 0)
    own = tuple(layers[layer] for layer in sorted(layers) if layers[layer])
    return Needs(nbytes - sum(own), own)


def layer_modules(model: Any) -> dict[int, tuple[str, int]]:
    """The path and the layer of each module that has matrices of a layer, by its `id()`."""
    return {
        id(leaf): (path, int(found[1]))
        for path, leaf in model.walk()
        if isinstance(leaf, Linear) and not isinstance(leaf, Head) and (found := _LAYER.match(path))
    }


def allot(needs: Sequence[Needs], free: int, weights_memory: int | None) -> list[int]:
    """The bytes that the weights of each process may take if they are streamed; zeros if all fit. free: bytes of
    memory. weights_memory: the user's wish, for all processes together. Each can hold the same share of what it could
    stream, so all read about the same share of their layers. Raises ConfigError if there is too little."""
    budget = budget_of(sum(one.all for one in needs), free, weights_memory)
    if not budget:
        return [0] * len(needs)
    least = sum(one.least for one in needs)
    if budget < least:
        raise too_little(budget, least)
    spare = sum(one.all - one.least for one in needs)
    return [one.least + (budget - least) * (one.all - one.least) // max(spare, 1) for one in needs]


def budget_of(needed: int, free: int, weights_memory: int | None) -> int:
    """The bytes that weights of `needed` bytes may take if they are streamed; 0 if they are not. free: bytes of memory.
    weights_memory: the user's wish. Raises ConfigError."""
    most = min(weights_memory or free, free)
    if needed <= most:
        return 0
    if not hasattr(os, "preadv"):
        raise ConfigError("weights cannot be streamed on this system", "use a smaller model, or quantize it")
    if weights_memory and weights_memory > free:
        raise ConfigError(f"weights_memory is {mib(weights_memory)}, and {mib(free)} of memory are free", "lower it")
    return weights_memory or int(free * SHARE)


def too_little(budget: int, least: int) -> ConfigError:
    """The error for weights that cannot even be streamed through so many bytes."""
    return ConfigError(
        f"weights of {mib(budget)} in memory are too few: this model needs {at_least(least)}, for the embedding table, "
        "the head and one layer",
        "raise --weights-memory or the memory limit",
    )


def at_least(size: int) -> str:
    """Bytes for users who are to give so many: rounded up."""
    return f"{-(-size >> 10)} KiB" if size < 10 << 20 else f"{-(-size * 10 >> 20) / 10:.1f} MiB"


def mib(size: float) -> str:
    """Bytes for users."""
    return f"{size / 2**20:.1f} MiB"
