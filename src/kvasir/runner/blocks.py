"""What plans do with whole blocks of a cache: copies within it, and to and from the host."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from kvasir.plan import Bytes, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.kv_cache import KVCache


class Coming(Protocol):
    """Bytes on their way; `result` waits for them."""

    def result(self) -> memoryview: ...


Exported = memoryview | Coming


class BlockCache(Protocol):
    """What both executors' caches can do with whole blocks. `export` takes a block as it is now, though its bytes may
    still be on their way."""

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None: ...

    def export(self, group: int, block: int) -> Exported: ...

    def import_(self, group: int, block: int, data: Bytes) -> None: ...


class Copies(Protocol):
    """See device.Copier."""

    def read(self, source: Tensor) -> Future[memoryview]: ...

    def write(self, target: Tensor, data: Bytes) -> None: ...

    def close(self) -> None: ...


class StagedBlocks:
    """Of a cache that is not in the host's memory: its bytes come and go beside the computing."""

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
    """What several copies bring."""

    def __init__(self, parts: Sequence[Future[memoryview]]):
        self._parts = parts

    def result(self) -> memoryview:
        return memoryview(b"".join(part.result() for part in self._parts))


def move_blocks(cache: BlockCache, plan: StepPlan) -> tuple[Exported, ...]:
    """What a plan does with blocks before it computes; what its `saves` give."""
    saved = tuple(cache.export(group, block) for group, block in plan.saves)
    for group in sorted({g for g, _, _ in plan.copies}):
        cache.copy(group, [(source, target) for g, source, target in plan.copies if g == group])
    for group, block, data in plan.loads:
        cache.import_(group, block, data)
    return saved


def wait_all(saved: Sequence[Exported]) -> tuple[memoryview, ...]:
    """Waits for exports in flight; the bytes of all."""
    return tuple(part if isinstance(part, memoryview) else part.result() for part in saved)
