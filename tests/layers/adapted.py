"""Adapters of the eager executor, for tests that call modules themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvasir.lora import Adapter, LowRank
from kvasir.runner.eager_adapters import EagerAdapters

_MADE: WeakKeyDictionary[Any, EagerAdapters] = WeakKeyDictionary()


def adapter_of(pairs: Mapping[str, tuple[Any, Any, float]], **more: Any) -> Adapter:
    """An adapter of matrix pairs by slot: (a, b, scale). more: its other fields."""
    matrices = {slot: LowRank(np.asarray(a), np.asarray(b), scale) for slot, (a, b, scale) in pairs.items()}
    fields = {"matrices": matrices, "tables": {}, "saved": {}, "tokens": {}, **more}
    return Adapter("peft", "0" * 64, **fields)


def adapters_of(model: Any) -> EagerAdapters:
    """The adapters of a model, or of some of its modules."""
    return _MADE.setdefault(model, EagerAdapters(model, "cpu"))


def set_adapter(model: Any, id: int, pairs: Mapping[str, Any] | Adapter | None) -> None:
    """Sets an adapter, given as it is or as matrix pairs; removes it if there are none."""
    adapter = adapter_of(pairs) if isinstance(pairs, Mapping) else pairs
    adapters_of(model).set(id, adapters_of(model).pack(adapter) if pairs and adapter else None)


def in_use(model: Any, batch: Any, adapters: Sequence[int]) -> AbstractContextManager[None]:
    """Within it, the sequences of a batch have these adapters, 0 for none."""
    counts = np.diff(batch.starts)
    rows = [((id, 1.0),) if id else () for id, count in zip(adapters, counts, strict=True) for _ in range(count)]
    return adapters_of(model).use(rows)
