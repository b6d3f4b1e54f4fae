"""Store: blocks beyond the pools. Evicted blocks are saved to a tier; the prefix of a waiting sequence is fetched.

    prompt     |----- hit in the tree -----|--- fetched ---|--- computed ---|
               0                         first        first + count

A fetch begins when the tier knows which blocks it has: at once, or after a peer has responded. It ends when all its
parts have arrived, when a part fails, or at its deadline. The leading blocks that have arrived by then are used, the
other tokens are computed. The tier verifies the bytes before it returns them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from kvasir.caches import CacheKind
from kvasir.kv.node import ID_BYTES
from kvasir.kv.pool import SCRATCH
from kvasir.kv.tiers.block import StoredBlock, chain, fixed_chain
from kvasir.kv.tiers.connector import Failed, KVConnector
from kvasir.plan import CacheGroup

Part = tuple[int, int]  # group, index of the block in its sequence
Save = tuple[StoredBlock, int, int]  # group, block id

ASK_SECONDS = 0.2  # a sequence waits at most this long for a peer to report its blocks
UNKNOWN_SECONDS = 5.0  # time limit of a fetch if the time to compute its tokens is unknown
FETCH_TIME_FACTOR = 2.0  # otherwise the time limit, as a multiple of the time to compute its tokens


@dataclass(frozen=True, slots=True)
class Question:
    """A query for blocks of a sequence that has its first `known` tokens and its first `first` blocks. names: the
    blocks of the sequence, per group. seconds(n): the time to compute the n tokens after the first `known`, 0 for
    unknown. settled(timeout): whether all blocks that are on their way have arrived; see Inbox."""

    names: Sequence[Sequence[StoredBlock]]
    first: int
    known: int
    seconds: Callable[[int], float]
    settled: Callable[[float], bool] | None = None

    def keys(self, group: int, kind: CacheKind) -> list[bytes]:
        """The keys to ask the tier for: the blocks after the first ones; for a group of fixed size all its blocks, but
        only if the sequence has no block yet."""
        names = self.names[group]
        return [block.key for block in (names[: 0 if self.first else None] if kind.fixed else names[self.first :])]


@dataclass(slots=True, eq=False)
class Fetch:
    """A load of blocks [first, first + count) of one sequence. question: the query, until the tier has answered it or
    the deadline has passed. tickets: of parts still loading. parts: bytes that have arrived. A fetch with count 0 and
    no question found nothing worth loading."""

    first: int = 0
    count: int = 0
    deadline: float = inf
    question: Question | None = None
    tickets: dict[Part, int] = field(default_factory=dict)
    parts: dict[Part, memoryview] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether the fetch waits for an answer or for parts."""
        return self.question is not None or bool(self.tickets)


def reach(
    groups: Sequence[CacheGroup], block_size: int, first: int, count: int, have: Callable[[int, int], bool]
) -> int:
    """The largest number of blocks after the first `first`, at most `count`, after which every group can continue.
    have(group, index): whether that block is available."""
    kinds = [group.kind for group in groups]
    if not all(have(g, i) for g, kind in enumerate(kinds) if kind.fixed for i in kind.added(first, first, block_size)):
        return 0
    full = [g for g, kind in enumerate(kinds) if not kind.forgets and not kind.fixed]
    count = next((i for i in range(count) if not all(have(g, first + i) for g in full)), count)
    forgetting = [(g, kind) for g, kind in enumerate(kinds) if kind.forgets]
    while count:
        end = first + count
        missing = max(
            (i for g, kind in forgetting for i in kind.added(first, end, block_size) if not have(g, i)), default=end
        )
        if missing == end:
            break
        count = missing - first
    return count


class BlockStore:
    """One tier under the pools. max_bytes: bound on the parts that fetches hold or wait for. Only the scheduler uses
    it."""

    def __init__(self, tier: KVConnector, groups: Sequence[CacheGroup], block_size: int, max_bytes: int):
        self.tier = tier
        self.groups = tuple(groups)
        self.block_size = block_size
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of the parts of all fetches
        self.unused: Counter[str] = Counter()  # parts: "late" (deadline passed), "slow" (slower than computing)
        self._sizes = [group.num_bytes for group in tier.facts.groups]
        self._saves: list[Save] = []

    # -- saving ------------------------------------------------------------------------------------------------

    def note(self, block: StoredBlock, index: int, ids: Sequence[int], seconds: Callable[[int, int], float]) -> None:
        """Queues block `ids[g]` of each group g, unless SCRATCH, for saving if the tier wants it; it must be saved
        before it is written again. index: of the block in its sequence. seconds(start, tokens): the time to compute
        `tokens` tokens after the first `start`, 0 for unknown."""
        pace = self._pace(index + 1, seconds)
        for group, id in enumerate(ids):
            if id != SCRATCH and self.tier.wants(block.key, group, pace, index):
                self._saves.append((block, group, id))

    def _pace(self, count: int, seconds: Callable[[int, int], float]) -> float:
        """Bytes per second at which computing produces the parts needed to continue after `count` blocks, 0 for
        unknown."""
        time = seconds(0, count * self.block_size)
        return sum(self._sizes[g] for g, _ in self._parts(0, count)) / time if time > 0 else 0.0

    @property
    def has_saves(self) -> bool:
        """Whether `take_saves` would return anything."""
        return bool(self._saves)

    def take_saves(self) -> list[Save]:
        """Removes and returns the queued saves; the next step performs them before anything else."""
        saves, self._saves = self._saves, []
        return saves

    # -- fetching ----------------------------------------------------------------------------------------------

    def fetch(
        self,
        namespace: bytes,
        ids: bytes,
        known: int,
        seconds: Callable[[int], float],
        now: float,
        settled: Callable[[float], bool] | None = None,
    ) -> Fetch:
        """Begins to load the blocks after the first `known` tokens of `ids` (packed), as far as the tier has them.

        seconds(n), settled(timeout): see Question. Without `settled` nothing is on its way."""
        first = known // self.block_size
        room = self._room(first)
        if len(ids) < (first + 1) * self.block_size * ID_BYTES or not room:
            return Fetch()
        blocks = chain(namespace, ids[: (first + room) * self.block_size * ID_BYTES], self.block_size)
        names = [self._fixed_names(namespace, group.kind) or blocks for group in self.groups]
        fetch = Fetch(first, 0, now + ASK_SECONDS, Question(names, first, known, seconds, settled))
        self._ask(fetch, now, 0.0)
        return fetch

    def _fixed_names(self, namespace: bytes, kind: CacheKind) -> list[StoredBlock]:
        return fixed_chain(namespace, kind.blocks(0, self.block_size), self.block_size)

    def _room(self, first: int) -> int:
        """The number of blocks after the first ones that may be fetched within `max_bytes`, with all other fetches."""
        pairs = list(zip(self._sizes, (group.kind for group in self.groups), strict=True))
        fixed = sum(size * len(kind.added(first, first, self.block_size)) for size, kind in pairs)
        return max(0, self.max_bytes - self.num_bytes - fixed) // sum(size for size, kind in pairs if not kind.fixed)

    def _ask(self, fetch: Fetch, now: float, timeout: float) -> None:
        question = fetch.question
        assert question
        if question.settled:
            if not question.settled(timeout):
                fetch.deadline = now + ASK_SECONDS
                return
            timeout = 0.0
        keys = [question.keys(g, group.kind) for g, group in enumerate(self.groups)]
        answered = all([self.tier.ask(names, group, timeout) for group, names in enumerate(keys) if names])
        if answered or now > fetch.deadline:
            fetch.question = None
            self._begin(fetch, question, now)

    def _begin(self, fetch: Fetch, question: Question, now: float) -> None:
        """Begins to load the blocks that the tier has, unless computing their tokens is faster."""
        names, first = question.names, fetch.first
        most = min(len(blocks) for blocks, group in zip(names, self.groups, strict=True) if not group.kind.fixed)

        def have(group: int, index: int) -> bool:
            return self.tier.has((names[group][index].key,), group) > 0

        count = reach(self.groups, self.block_size, first, min(max(0, most - first), self._room(first)), have)
        if not count:
            return
        parts = self._parts(first, count)
        compute = question.seconds((first + count) * self.block_size - question.known)
        if 0 < compute <= self.tier.read_seconds([(names[g][i].key, g) for g, i in parts]):
            self.unused["slow"] += len(parts)
            return
        fetch.count, fetch.deadline = count, now + (FETCH_TIME_FACTOR * compute or UNKNOWN_SECONDS)
        fetch.tickets = {(g, i): self.tier.start_load(names[g][i], g) for g, i in parts}
        self.num_bytes += sum(self._sizes[g] for g, _ in parts)

    def _parts(self, first: int, count: int) -> list[Part]:
        """The parts needed to continue after block `first + count` for a sequence that has its first `first` blocks,
        ordered by index."""
        needed = (group.kind.added(first, first + count, self.block_size) for group in self.groups)
        return sorted(((g, i) for g, indices in enumerate(needed) for i in indices), key=lambda part: part[1])

    def poll(self, fetch: Fetch, now: float, timeout: float = 0.0) -> None:
        """Collects parts that have arrived. Waits at most `timeout` seconds for the next part or answer."""
        if fetch.question:
            self._ask(fetch, now, timeout)
            return
        for part, ticket in list(fetch.tickets.items()):
            found = self.tier.poll(ticket, timeout)
            if found is None:
                break
            timeout = 0.0
            del fetch.tickets[part]
            if isinstance(found, Failed):
                self.num_bytes -= self._sizes[part[0]]
                self._give_up(fetch)
                return
            fetch.parts[part] = found
        if fetch.open and now > fetch.deadline:
            self.unused["late"] += len(fetch.tickets)
            self._give_up(fetch)

    def _give_up(self, fetch: Fetch) -> None:
        """Cancels what is still loading; parts that have arrived stay."""
        fetch.question = None
        for (group, _), ticket in fetch.tickets.items():
            self.tier.cancel(ticket)
            self.num_bytes -= self._sizes[group]
        fetch.tickets = {}

    def arrived(self, fetch: Fetch, first: int) -> int:
        """The number of tokens from which a sequence with its first `first` blocks can continue thanks to the arrived
        parts; 0 if they bring it no further."""
        if not fetch.first <= first < fetch.first + fetch.count:
            return 0
        count = reach(
            self.groups,
            self.block_size,
            first,
            fetch.first + fetch.count - first,
            lambda g, i: (g, i) in fetch.parts,
        )
        return (first + count) * self.block_size if count else 0

    def end(self, fetch: Fetch) -> None:
        """Cancels the fetch and frees its parts; the sequence does not need them."""
        self._give_up(fetch)
        self.num_bytes -= sum(self._sizes[g] for g, _ in fetch.parts)
        fetch.parts = {}
