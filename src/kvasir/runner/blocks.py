"""Moves whole blocks of a cache as plans require: copies within it, exports to the host, imports from it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from kvasir.plan import Bytes, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.kv_cache import KVCache


class PendingExport(Protocol):
    """Bytes of a transfer in progress; `result` waits for them."""

    def result(self) -> memoryview: ...


Exported = memoryview | PendingExport


class BlockCache(Protocol):
    """Operations on whole blocks that both executors' caches have. `export` gives the block's bytes at the time of the
    call, though their transfer may still be in progress."""

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None: ...

    def export(self, group: int, block: int) -> Exported: ...

    def import_(self, group: int, block: int, data: Bytes) -> None: ...


class Copies(Protocol):
    """See device.Copier."""

    def read(self, source: Tensor) -> Future[memoryview]: ...

    def write(self, target: Tensor, data: Bytes) -> None: ...

    def close(self) -> None: ...


class StagedBlocks:
    """Blocks of a cache outside the host's memory, transferred while the device computes."""

    def __init__(self, cache: KVCache, copies: Copies):
        self._cache = cache
        self._copies = copies

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._cache.copy(group, pairs)

    def export(self, group: int, block: int) -> Exported:
        parts = [self._copies.read(piece) for piece in self._cache.portable(group, block)]
        return parts[0] if len(parts) == 1 else _Parts(parts)

    def import_(self, group: int, block: int, data: Bytes) -> None:
        for piece in self._cache.portable(group, block):
            self._copies.write(piece, data[: piece.nbytes])
            data = data[piece.nbytes :]


class _Parts:
    """The concatenated bytes of several copies."""

    def __init__(self, parts: Sequence[Future[memoryview]]):
        self._parts = parts

    def result(self) -> memoryview:
        return memoryview(b"".join(part.result() for part in self._parts))


def move_blocks(cache: BlockCache, plan: StepPlan) -> tuple[Exported, ...]:
    """Carries out a plan's `saves`, `copies` and `loads`, in this order; returns the exports of its `saves`."""
    saved = tuple(cache.export(group, block) for group, block in plan.saves)
    for group in sorted({g for g, _, _ in plan.copies}):
        cache.copy(group, [(source, target) for g, source, target in plan.copies if g == group])
    for group, block, data in plan.loads:
        cache.import_(group, block, data)
    return saved


def wait_all(saved: Sequence[Exported]) -> tuple[memoryview, ...]:
    """Waits for exports in flight; returns the bytes of all."""
    return tuple(part if isinstance(part, memoryview) else part.result() for part in saved)
