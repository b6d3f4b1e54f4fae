"""Tiering: which blocks sequences fetch from a tier below the pools or from another engine, which steps save evicted
blocks, and which export blocks for another engine.

A waiting sequence starts one fetch (`begin`) for the blocks after its hit. Other sequences overtake it until the fetch
has ended. A sequence that has joined has no fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from kvasir.errors import InvalidRequest
from kvasir.kv.node import common
from kvasir.kv.radix import Hit, PrefixTree
from kvasir.kv.store import BlockStore, Save
from kvasir.kv.tiers.block import StoredBlock
from kvasir.kv.transfer.exchange import BlockExchange
from kvasir.plan import Capacity, StepPlan, StepResult, Work
from kvasir.sched.admission import SHARED
from kvasir.sched.sending import Export, Sendings
from kvasir.sched.sequence import Sequence
from kvasir.sched.step import Load
from kvasir.types import Request


class Tiering:
    """Owns the store, and the saves and exports of each pending step. Without a store nothing is fetched or saved,
    without an exchange nothing is sent to other engines or taken from them.

    seconds(start, tokens): time to compute `tokens` tokens after the first `start`, 0 if unknown."""

    def __init__(
        self,
        store: BlockStore | None,
        block_size: int,
        seconds: Callable[[int, int], float],
        exchange: BlockExchange | None = None,
    ):
        self.store, self.exchange = store, exchange
        self.sendings: Sendings | None = None
        self._block_size = block_size
        self._seconds = seconds
        self._saving: dict[int, list[Save]] = {}  # by step number
        self._exports: list[Export] = []  # of the step being planned
        self._exporting: dict[int, list[Export]] = {}  # by step number
        self._open: dict[Sequence, None] = {}  # sequences with an open fetch, in the order of their starts

    # -- other engines -----------------------------------------------------------------------------------------

    def send_from(self, tree: PrefixTree, capacity: Capacity) -> None:
        """Lets requests send blocks that are in the tree. Call it once."""
        if self.exchange:
            self.sendings = Sendings(self.exchange, tree, capacity)

    def refuse_impossible(self, request: Request) -> None:
        """Raises InvalidRequest for blocks to be sent or taken where that cannot be done."""
        if request.sends or request.takes:
            if self.exchange is None:
                raise InvalidRequest("this engine exchanges no blocks", "see --role", "kv_transfer_params")
            self.exchange.check(request.sends, request.takes)

    def enter(self, seq: Sequence) -> None:
        """Begins the transfers of a new request, whose first sequence this is."""
        if self.exchange and seq.request.takes:
            self.exchange.expect(seq.request.takes)
        if self.sendings and seq.request.sends:
            self.sendings.begin(seq, seq.content.namespace.startswith(SHARED) and not seq.embeds)

    @property
    def sending(self) -> bool:
        """Whether a step is due that exports blocks."""
        return self.sendings is not None and self.sendings.due

    # -- saving ------------------------------------------------------------------------------------------------

    def evicted(self, block: StoredBlock, index: int, ids: tuple[int, ...]) -> None:
        """Queues an evicted block for saving, unless its namespace is private to this engine."""
        if self.store and block.namespace.startswith(SHARED):
            self.store.note(block, index, ids, self._seconds)

    def has_saves(self) -> bool:
        """Whether blocks are to be saved or exported."""
        if self.sendings is not None and not self._exports:
            self._exports = self.sendings.take()
        return bool(self._exports) or (self.store is not None and self.store.has_saves)

    def saves(self, step: int) -> list[tuple[int, int]]:
        """Assigns what is to be saved and exported to a step and returns it: (group, block id)."""
        saves = self.store.take_saves() if self.store and self.has_saves() else []
        if saves:
            self._saving[step] = saves
        exports, self._exports = self._exports, []
        if exports:
            self._exporting[step] = exports
        return [(group, id) for _, group, id in saves] + [(part[0], id) for _, part, id in exports]

    def saved(self, plan: StepPlan, result: StepResult) -> None:
        """Passes the bytes that a step returned to the tier, and to other engines."""
        saves, exports = self._saving.pop(plan.step, []), self._exporting.pop(plan.step, [])
        payloads = result.saved
        for (block, group, _), payload in zip(saves, payloads[: len(saves)], strict=True):
            assert self.store
            self.store.tier.save(block, group, payload)
        if exports:
            assert self.sendings is not None
            self.sendings.exported(exports, payloads[len(saves) :])
        for work, row in zip(plan.work, result.rows, strict=True):
            if row.error and work.grows:
                self._drop_growing(plan.step, work.grows)

    def forget(self, step: int) -> None:
        """Drops the saves and exports of a step that did not run."""
        self._saving.pop(step, None)
        if exports := self._exporting.pop(step, None):
            assert self.sendings is not None
            self.sendings.forget(exports)
        self._drop_growing(step)

    def grow(self, step: int, seqs: list[Sequence], works: list[Work]) -> list[Work]:
        """The works of a step, with the blocks that are sent to other engines as the step computes them."""
        return works if self.sendings is None else self.sendings.grow(step, seqs, works)

    def _drop_growing(self, step: int, blocks: Iterable[tuple[int, int]] | None = None) -> None:
        """Drops the parts of a step, or only those of some (group, block), that grow and will not be completed."""
        if self.sendings is not None:
            self.sendings.drop_growing(step, blocks)

    # -- fetching ----------------------------------------------------------------------------------------------

    def begin(self, seq: Sequence, hit: Hit | None, now: float) -> bool:
        """Starts a fetch of the blocks after the hit, once while the sequence waits; returns whether to wait for it."""
        asks = seq.reusable and not seq.suspect and seq.content.namespace.startswith(SHARED)
        if self.store is None or seq.fetch is not None or not asks:
            return False
        found, ids = hit.tokens if hit else 0, seq.content.key(seq.tokens[: seq.reusable])
        takes = seq.request.takes
        settled = partial(self.exchange.inbox.settled, takes.id) if self.exchange and takes else None
        seq.fetch = self.store.fetch(seq.content.namespace, ids, found, lambda n: self._seconds(found, n), now, settled)
        if seq.fetch.open:
            self._open[seq] = None
        return seq.fetch.open

    def poll(self, now: float, timeout: float = 0.0) -> None:
        """Takes what has arrived; waits at most `timeout` seconds for the first open fetch, or for room for exports."""
        if timeout and not self._open and self.sendings and self.sendings.due:
            self.sendings.wait(timeout)
        for seq in list(self._open):
            assert self.store and seq.fetch
            self.store.poll(seq.fetch, now, timeout)
            timeout = 0.0
            if not seq.fetch.open:
                del self._open[seq]

    def arrived(self, seq: Sequence, hit: Hit | None) -> int:
        """End of the fetched blocks that directly follow the hit, in tokens; 0 if there are none."""
        if self.store is None or seq.fetch is None or seq.suspect:
            return 0
        return self.store.arrived(seq.fetch, hit.tokens // self._block_size if hit else 0)

    def coming(self, seq: Sequence, found: int) -> bool:
        """Whether a sequence that has no fetch, but its first `found` tokens, should wait for another sequence's fetch
        because it brings enough blocks of the same prefix."""
        if seq.fetch is not None or seq.suspect:
            return False
        for other in self._open:
            if other.content.namespace == seq.content.namespace:
                assert other.fetch
                end = (other.fetch.first + other.fetch.count) * self._block_size
                shared = min(common(other.content.prompt, seq.content.prompt), end, seq.reusable)
                if shared - found >= max(1, self._block_size // 2):
                    return True
        return False

    def loads(self, seq: Sequence, received: Iterable[tuple[int, int, int]]) -> list[Load]:
        """The fetched bytes of the blocks (group, index, id), to be written into the cache."""
        assert seq.fetch
        return [(group, id, seq.fetch.parts[group, index]) for group, index, id in received]

    def end(self, seq: Sequence) -> None:
        """Ends the fetch of a sequence, if it has one."""
        if self.store and seq.fetch:
            self.store.end(seq.fetch)
            if self.exchange and seq.request.takes:
                self.exchange.inbox.forget(seq.request.takes.id)
        self._open.pop(seq, None)
        seq.fetch = None

    def check(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        """Raises AssertionError."""
        assert not any(s.fetch for s in running), "a running sequence waits for a tier"
        asked = [s for s in waiting if s.fetch]
        assert {s for s in asked if s.fetch and s.fetch.open} <= set(self._open) <= set(asked), "a fetch is lost"
        assert asked or not self.store or not self.store.num_bytes, "bytes of a tier have no owner"
