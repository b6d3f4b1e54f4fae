"""Ranks of the graph executor, each a process with a GPU. All of them follow the same plans: each computes its part of
the model and samples from the same logits, so nothing that a step finds has to be sent.

Rank 0 sends the others each command of its executor's thread before it runs it, in the same order: collectives wait
for all ranks. Shared memory counts the commands (`program.shared`), and messages say what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvasir.errors import DeviceFault
from kvasir.graph.adapter_packing import PackedAdapter, Packing
from kvasir.layers.adapters import ModelChanges
from kvasir.layers.kv_layout import Bank
from kvasir.plan import Bytes, StepPlan, Work
from kvasir.program.shared import SharedRank
from kvasir.program.shared_packing import SharedAdapter, SharedPacking
from kvasir.runner.executor import ExecutorStep

if TYPE_CHECKING:
    from kvasir.layers.kv_cache import KVCache


class _Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    pass


class Step(_Message, frozen=True):
    """An ExecutorStep. places: of its works in the plan. Answered with `Saved` if the plan has saves."""

    plan: StepPlan
    places: list[int]
    starts: list[int]
    now: list[int]
    later: list[int]


class Draw(_Message, frozen=True):
    """Samples works of the last step with their masks."""

    at: list[int]
    masks: list[bytes | None]


class Install(_Message, frozen=True):
    """Gives a packed adapter, by its key, to an adapter id, or removes what has it (None). dropped: keys of packed
    adapters that no longer exist."""

    adapter: int
    key: int | None
    dropped: list[int]


class Saved(_Message, frozen=True):
    """A rank's shards of the blocks that a plan saves."""

    step: int
    shards: list[bytes]


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Step | Draw | Install).decode
_decode_saved = msgspec.msgpack.Decoder(Saved).decode


class Others(Protocol):
    """The processes of the other ranks, for rank 0. mesh: counts the commands."""

    @property
    def mesh(self) -> SharedRank: ...

    def send_each(self, messages: Sequence[Bytes]) -> None:
        """Sends each its own message. Raises DeviceFault if one is gone."""
        ...

    def receive(self) -> Sequence[Bytes]:
        """The answers of all, by rank. Raises as `send_each`."""
        ...

    def ask(self, message: Bytes) -> Callable[[], Sequence[Bytes]]:
        """Sends a message about an adapter to each; returns a function that waits for their answers. For any thread,
        one message at a time. Raises as `send_each`."""
        ...

    def lost(self) -> str:
        """Why the ranks were aborted."""
        ...

    def close(self) -> None:
        """Ends them."""
        ...


class Lead:
    """Rank 0's side. groups: number of the model's own cache groups; only rank 0 has those of a draft model. packing:
    of rank 0's parts of adapters."""

    def __init__(self, others: Others, groups: int, packing: Packing):
        self._others, self._groups = others, groups
        self._packing = SharedPacking(packing, others.ask)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._others.mesh.size

    @contextmanager
    def step(self, step: ExecutorStep) -> Iterator[None]:
        """The others compute a step, too. On the executor's thread. Raises DeviceFault if a rank is gone, or fails here
        alone."""
        with self._given(self._messages(step)):
            yield

    @contextmanager
    def draw(self, at: Sequence[int], masks: Sequence[bytes | None]) -> Iterator[None]:
        """The others sample works of the last step, too. As `step`."""
        found = [None if mask is None else bytes(mask) for mask in masks]
        with self._given([encode(Draw([*at], found))] * (self.size - 1)):
            yield

    def pack_adapter(self, adapter: ModelChanges) -> SharedAdapter:
        """Each rank packs its part. For any thread. Raises ValueError."""
        return self._packing.pack(adapter)

    @contextmanager
    def install(self, adapter: int, packed: SharedAdapter | None) -> Iterator[PackedAdapter | None]:
        """The others install their parts of an adapter, or remove it, too; gives rank 0's own. As `step`."""
        message = encode(Install(adapter, packed.key if packed else None, self._packing.dropped()))
        with self._given([message] * (self.size - 1)):
            yield packed.own if packed else None

    @contextmanager
    def _given(self, messages: Sequence[Bytes]) -> Iterator[None]:
        if not self._others.mesh.settle():
            raise DeviceFault(f"the ranks of the model have stopped: {self._others.lost()}")
        self._others.send_each(messages)
        self._others.mesh.give()
        try:
            yield
        except Exception as error:
            self._others.mesh.abort()  # the others have computed it, or wait for this rank
            raise DeviceFault(f"rank 0 failed beside the others ({self._others.lost()}): {error}") from error

    def _messages(self, step: ExecutorStep) -> list[Bytes]:
        """The step for each other rank. They differ only in the shards of loaded blocks."""
        if not step.plan.loads:
            return [encode(self._part(step, 1))] * (self.size - 1)
        return [encode(self._part(step, rank)) for rank in range(1, self.size)]

    def _part(self, step: ExecutorStep, rank: int) -> Step:
        """The step for another rank: without what only rank 0 returns, and with the rank's own shards."""
        plan, groups = step.plan, self._groups
        places = {id(work): place for place, work in enumerate(plan.work)}
        plan = replace(
            plan,
            work=tuple(self._work(work) for work in plan.work),
            saves=tuple(save for save in plan.saves if save[0] < groups),
            copies=tuple(copy for copy in plan.copies if copy[0] < groups),
            loads=tuple((group, block, self._shard(data, rank)) for group, block, data in plan.loads if group < groups),
        )
        return Step(plan, [places[id(work)] for work in step.works], [*step.starts], [*step.now], [*step.later])

    def _work(self, work: Work) -> Work:
        if work.want_pooled or work.want_hidden or len(work.blocks) > self._groups:
            return replace(work, want_pooled="", want_hidden=(), blocks=work.blocks[: self._groups])
        return work

    def _shard(self, data: Bytes, rank: int) -> Bytes:
        size = len(data) // self.size
        return memoryview(data)[rank * size : (rank + 1) * size]

    # -- blocks

    def own(self, plan: StepPlan) -> StepPlan:
        """The plan with rank 0's shards of the blocks that it loads."""
        if not plan.loads:
            return plan
        loads = ((g, block, self._shard(data, 0) if g < self._groups else data) for g, block, data in plan.loads)
        return replace(plan, loads=tuple(loads))

    def whole(self, plan: StepPlan, own: Sequence[memoryview]) -> tuple[memoryview, ...]:
        """The blocks that a plan saves, each the concatenation of all ranks' shards. own: those of rank 0."""
        shared = [at for at, (group, _) in enumerate(plan.saves) if group < self._groups]
        if not shared:
            return tuple(own)
        found = [[part] for part in own]
        for shards in self._saved(plan.step):
            for at, shard in zip(shared, shards, strict=True):
                found[at].append(memoryview(shard))
        return tuple(parts[0] if len(parts) == 1 else memoryview(b"".join(parts)) for parts in found)

    def _saved(self, step: int) -> list[list[bytes]]:
        answers = [_decode_saved(answer) for answer in self._others.receive()]
        while any(answer.step != step for answer in answers):  # of a step whose result was not taken
            answers = [_decode_saved(answer) for answer in self._others.receive()]
        return [answer.shards for answer in answers]

    def close(self) -> None:
        """Ends the others."""
        self._others.close()


class SharedBlocks:
    """The caches of all ranks, as tiers see them: each block is the concatenation of the ranks' shards. own: rank 0's.
    export: gives a block's bytes of all."""

    def __init__(self, own: KVCache, size: int, export: Callable[[StepPlan], memoryview]):
        self.groups, self.block_size, self.num_blocks = own.groups, own.block_size, own.num_blocks
        self._own, self._export, self._of = own, export, f"{size} ranks"

    def orders(self, group: int) -> list[tuple[Bank, str]]:
        """See KVCache.orders. Blocks of other numbers of ranks have other shards."""
        return [(bank, f"{order}, of {self._of}") for bank, order in self._own.orders(group)]

    def export(self, group: int, block: int) -> memoryview:
        """A copy of a block's bytes. Not during a step."""
        return self._export(StepPlan(-1, saves=((group, block),)))
