"""Store: blocks beyond the pools. What is evicted is saved to a tier; what a waiting sequence begins with is fetched.

    prompt     |----- hit in the tree -----|--- fetched ---|--- computed ---|
               0                         first        first + count

A fetch begins when the tier knows what it has: at once, or when a peer has answered. It ends when all its parts are
there, when one fails, or at its deadline; whatever leading blocks arrived by then are used, the rest is computed. Bytes
are checked by the tier before they get here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from kvasir.caches import Kind
from kvasir.kv.node import ID_BYTES
from kvasir.kv.pool import SCRATCH
from kvasir.kv.tiers.block import Block, chain, fixed_chain
from kvasir.kv.tiers.connector import Failed, KVConnector
from kvasir.plan import CacheGroup

Part = tuple[int, int]  # group, index of the block in its sequence
Save = tuple[Block, int, int]  # group, block id

ASK_SECONDS = 0.2  # so long at most a sequence waits for a peer to say what it has
UNKNOWN_SECONDS = 5.0  # a fetch may take so long when no one knows how long computing takes
PATIENCE = 2.0  # and else so many times what computing would take


@dataclass(frozen=True, slots=True)
class Question:
    """Whether the tier has blocks, named for each group, of a sequence that has its first `known` tokens and asks for
    what comes after the first `first` blocks. seconds(n): the time to compute n tokens after them, 0 for unknown."""

    names: Sequence[Sequence[Block]]
    first: int
    known: int
    seconds: Callable[[int], float]

    def keys(self, group: int, kind: Kind) -> list[bytes]:
        """Of the blocks that are asked for: all after the first ones, or those that are fixed if there are none."""
        names = self.names[group]
        return [block.key for block in (names[: 0 if self.first else None] if kind.fixed else names[self.first :])]


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks [first, first + count) of one sequence. question: until it is answered, or the deadline has passed;
    tickets: of parts on their way; parts: what has arrived. count 0 without a question: the tier had nothing that was
    worth it."""

    first: int = 0
    count: int = 0
    deadline: float = inf
    question: Question | None = None
    tickets: dict[Part, int] = field(default_factory=dict)
    parts: dict[Part, memoryview] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        return self.question is not None or bool(self.tickets)


def reach(
    groups: Sequence[CacheGroup], block_size: int, first: int, count: int, have: Callable[[int, int], bool]
) -> int:
    """How many blocks after the first `first`, at most `count`, bring every group to where it can go on.
    have(group, index): whether that block can be had."""
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


class Store:
    """One tier under the pools. max_bytes: of all parts that fetches hold or wait for. Used by the scheduler alone."""

    def __init__(self, tier: KVConnector, groups: Sequence[CacheGroup], block_size: int, max_bytes: int):
        self.tier = tier
        self.groups = tuple(groups)
        self.block_size = block_size
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of the parts of all fetches
        self.unused: Counter[str] = Counter()  # parts: "late" (computed instead), "slow" (not asked for)
        self._sizes = [group.num_bytes for group in tier.facts.groups]
        self._saves: list[Save] = []

    # -- saving ------------------------------------------------------------------------------------------------

    def note(self, block: Block, index: int, ids: Sequence[int], seconds: Callable[[int, int], float]) -> None:
        """Block `ids[g]` of group g, unless SCRATCH, is to be saved before anybody writes to it, if the tier wants it.
        index: in its sequence. seconds(start, tokens): the time to compute so many tokens after the first `start`, 0
        for unknown."""
        pace = self._pace(index + 1, seconds)
        for group, id in enumerate(ids):
            if id != SCRATCH and self.tier.wants(block.key, group, pace, index):
                self._saves.append((block, group, id))

    def _pace(self, count: int, seconds: Callable[[int, int], float]) -> float:
        """Bytes a second that computing makes of what brings a sequence after its first blocks, 0 for unknown."""
        time = seconds(0, count * self.block_size)
        return sum(self._sizes[g] for g, _ in self._parts(0, count)) / time if time > 0 else 0.0

    @property
    def has_saves(self) -> bool:
        return bool(self._saves)

    def take_saves(self) -> list[Save]:
        """What is to be saved by the next step, before all else."""
        saves, self._saves = self._saves, []
        return saves

    # -- fetching ----------------------------------------------------------------------------------------------

    def fetch(self, namespace: bytes, ids: bytes, known: int, seconds: Callable[[int], float], now: float) -> Fetch:
        """Begins to load what comes after the first `known` tokens of `ids` (packed), as far as the tier has it.

        seconds(n): see Question."""
        first = known // self.block_size
        room = self._room(first)
        if len(ids) < (first + 1) * self.block_size * ID_BYTES or not room:
            return Fetch()
        blocks = chain(namespace, ids[: (first + room) * self.block_size * ID_BYTES], self.block_size)
        names = [self._fixed_names(namespace, group.kind) or blocks for group in self.groups]
        fetch = Fetch(first, 0, now + ASK_SECONDS, Question(names, first, known, seconds))
        self._ask(fetch, now, 0.0)
        return fetch

    def _fixed_names(self, namespace: bytes, kind: Kind) -> list[Block]:
        return fixed_chain(namespace, kind.blocks(0, self.block_size), self.block_size)

    def _room(self, first: int) -> int:
        """Blocks that may be fetched after the first ones, beside those of other fetches."""
        pairs = list(zip(self._sizes, (group.kind for group in self.groups), strict=True))
        fixed = sum(size * len(kind.added(first, first, self.block_size)) for size, kind in pairs)
        return max(0, self.max_bytes - self.num_bytes - fixed) // sum(size for size, kind in pairs if not kind.fixed)

    def _ask(self, fetch: Fetch, now: float, timeout: float) -> None:
        question = fetch.question
        assert question
        keys = [question.keys(g, group.kind) for g, group in enumerate(self.groups)]
        answered = all([self.tier.ask(names, group, timeout) for group, names in enumerate(keys) if names])
        if answered or now > fetch.deadline:
            fetch.question = None
            self._begin(fetch, question, now)

    def _begin(self, fetch: Fetch, question: Question, now: float) -> None:
        """Begins to load what the tier has, if that is faster than to compute it."""
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
        fetch.count, fetch.deadline = count, now + (PATIENCE * compute or UNKNOWN_SECONDS)
        fetch.tickets = {(g, i): self.tier.start_load(names[g][i], g) for g, i in parts}
        self.num_bytes += sum(self._sizes[g] for g, _ in parts)

    def _parts(self, first: int, count: int) -> list[Part]:
        """What all groups need to continue after `count` more blocks than the first ones, which they have."""
        needed = (group.kind.added(first, first + count, self.block_size) for group in self.groups)
        return sorted(((g, i) for g, indices in enumerate(needed) for i in indices), key=lambda part: part[1])

    def poll(self, fetch: Fetch, now: float, timeout: float = 0.0) -> None:
        """Takes what has arrived; waits for what comes next at most `timeout` seconds."""
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
        """What has arrived stays."""
        fetch.question = None
        for (group, _), ticket in fetch.tickets.items():
            self.tier.cancel(ticket)
            self.num_bytes -= self._sizes[group]
        fetch.tickets = {}

    def arrived(self, fetch: Fetch, first: int) -> int:
        """Tokens up to which all is there, for a sequence that has its first `first` blocks; 0 for nothing more."""
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
        """The sequence needs nothing of it any more."""
        self._give_up(fetch)
        self.num_bytes -= sum(self._sizes[g] for g, _ in fetch.parts)
        fetch.parts = {}
