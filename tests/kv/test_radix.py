"""The prefix tree: it finds what a plain dict of token runs says it must, no block it gives holds other tokens than
those asked for, nothing that somebody holds is evicted, and counts always add up."""

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvasir.kv.blocks import BlockTable, SequenceBlocks, blocks_for
from kvasir.kv.node import common as num_equal
from kvasir.kv.policy import POLICIES
from kvasir.kv.pool import SCRATCH, BlockPool
from kvasir.kv.radix import Hit, PrefixTree
from kvasir.kv.tiers.block import chain
from kvasir.plan import CacheGroup, pack_ids, unpack_ids

FULL = CacheGroup("full", (0,), 1)


def window(tokens: int) -> CacheGroup:
    return CacheGroup("window", (1,), 1, tokens)


class Run:
    """A sequence at work: its tokens, of which the first `computed` are in the blocks."""

    def __init__(self, namespace: bytes, tokens: list[int], blocks: SequenceBlocks, computed: int = 0):
        self.namespace = namespace
        self.tokens = tokens
        self.blocks = blocks
        self.computed = computed
        self.joined = False  # has made the partly filled last block its own


class World:
    """Pools, a tree, the sequences, and what is written in every block: each position remembers all ids up to it."""

    def __init__(self, groups=(FULL,), num_blocks=32, block_size=4, policy="lru", on_evict=None):
        self.groups = tuple(groups)
        self.pools = tuple(BlockPool(num_blocks) for _ in groups)
        self.tree = PrefixTree(self.pools, groups, block_size, POLICIES[policy], on_evict)
        self.block_size = block_size
        self.written = [[[None] * block_size for _ in range(num_blocks)] for _ in groups]
        self.runs: list[Run] = []

    def start(self, namespace: bytes, tokens: list[int], use=True) -> Run:
        run = Run(namespace, tokens, self.tables())
        self.runs.append(run)
        if use:
            hit = self.tree.match(namespace, pack_ids(tokens), len(tokens) - 1)
            self.verify(hit, namespace, tokens)
            self.tree.use(hit)
            for table, ids in zip(run.blocks.tables, hit.blocks, strict=True):
                table.adopt(ids)
            run.computed = hit.tokens
        return run

    def tables(self) -> SequenceBlocks:
        pairs = zip(self.pools, self.groups, strict=True)
        return SequenceBlocks(tuple(BlockTable(pool, self.block_size, group.window) for pool, group in pairs))

    def verify(self, hit: Hit, namespace: bytes, tokens: list[int]) -> None:
        for g, blocks in enumerate(hit.blocks):
            assert len(blocks) == blocks_for(hit.tokens, self.block_size)
            reach = self.groups[g].window or inf
            for p in range(hit.tokens):
                if hit.tokens - p < reach:
                    assert self.read(g, blocks, p) == (namespace, *tokens[: p + 1]), "a hit of other tokens"
                elif p // self.block_size < (hit.tokens - reach + 1) // self.block_size:
                    assert blocks[p // self.block_size] == SCRATCH, "more than what is needed"

    def read(self, group: int, blocks, position: int):
        assert blocks[position // self.block_size] != SCRATCH
        return self.written[group][blocks[position // self.block_size]][position % self.block_size]

    def has_room(self, run: Run, num_tokens: int) -> bool:
        """Makes room as a scheduler would, or says that there is none."""
        spare = not run.joined
        for table in run.blocks.tables:
            if table.missing(num_tokens) + spare > table.pool.available:
                return False
        for g, table in enumerate(run.blocks.tables):
            lacking = table.missing(num_tokens) + spare - table.pool.free
            if lacking > 0:
                assert self.tree.evict(g, lacking) >= lacking, "what is available cannot be had"
        return True

    def compute(self, run: Run, num_tokens: int) -> bool:
        """Computes up to `num_tokens`; False, with nothing done, when there is no room."""
        if not self.has_room(run, num_tokens):
            return False
        if not run.joined:
            for g, source, target in run.blocks.make_own(run.computed):
                self.written[g][target] = list(self.written[g][source])
            run.joined = True
        for g, (_, new) in enumerate(run.blocks.extend(num_tokens)):
            for block in new:
                self.written[g][block] = [None] * self.block_size
        for g, table in enumerate(run.blocks.tables):
            for p in range(run.computed, num_tokens):
                slot = self.written[g][table.ids[p // self.block_size]]
                slot[p % self.block_size] = (run.namespace, *run.tokens[: p + 1])
        run.computed = num_tokens
        return True

    def insert(self, run: Run, priority=0) -> None:
        ids = pack_ids(run.tokens[: run.computed])
        self.tree.insert(run.namespace, ids, [t.ids for t in run.blocks.tables], priority)

    def end(self, run: Run) -> None:
        run.blocks.release()
        self.runs.remove(run)

    def serve(self, tokens: list[int], namespace=b"", priority=0, use=True) -> int:
        """One sequence from its beginning to its end; returns the tokens it found in the cache."""
        run = self.start(namespace, tokens, use)
        found = run.computed
        assert self.compute(run, len(tokens))
        self.insert(run, priority)
        self.end(run)
        self.check()
        return found

    def cached(self, tokens: list[int], namespace=b"") -> int:
        hit = self.tree.match(namespace, pack_ids(tokens))
        self.verify(hit, namespace, tokens)
        return hit.tokens

    def check(self) -> None:
        self.tree.check([[run.blocks.tables[g].ids for run in self.runs] for g in range(len(self.groups))])
        for run in self.runs:
            for g, table in enumerate(run.blocks.tables):
                for p in range(run.computed):
                    if table.ids[p // self.block_size]:
                        assert self.read(g, table.ids, p) == (run.namespace, *run.tokens[: p + 1]), "overwritten"

    def entries(self) -> dict[tuple, tuple[int, ...]]:
        """(namespace, all ids up to the end of a block, or of a partly filled one) -> its block in each group."""
        found = {}
        for root in self.tree._roots.values():
            stack = [(root, ())]
            while stack:
                node, before = stack.pop()
                ids = (*before, *unpack_ids(node.ids))
                for i in range(node.num_blocks):
                    end = min(len(ids), (node.start + i + 1) * self.block_size)
                    found[root.namespace, *ids[:end]] = tuple(b[i] for b in node.blocks)
                stack += [(child, ids) for child in node.children]
        return found


class Plain:
    """What the tree must know, as a dict: (namespace, all ids up to the end of a block) -> its block in each group."""

    def __init__(self, world: World):
        self.world = world
        self.size = world.block_size
        self.blocks: dict[tuple, tuple[int, ...]] = {}

    def siblings(self, namespace: bytes, before: tuple) -> list[tuple]:
        return [
            key[1:]
            for key in self.blocks
            if key[0] == namespace
            and key[1 : 1 + len(before)] == before
            and len(before) < len(key) - 1 <= len(before) + self.size
        ]

    def insert(self, namespace: bytes, tokens: list[int], tables) -> None:
        for i in range(blocks_for(len(tokens), self.size)):
            run = tuple(tokens[: (i + 1) * self.size])
            mine = tuple(table[i] for table in tables)
            alike = self.siblings(namespace, run[: i * self.size])
            for other in alike:
                if len(other) < len(run) and run[: len(other)] == other:
                    del self.blocks[namespace, *other]
            if (namespace, *run) in self.blocks:
                old = self.blocks[namespace, *run]
                self.blocks[namespace, *run] = tuple(a or b for a, b in zip(old, mine, strict=True))
            elif not any(len(other) > len(run) and other[: len(run)] == run for other in alike):
                self.blocks[namespace, *run] = mine

    def expected(self, namespace: bytes, tokens: list[int]) -> set[int]:
        """The lengths that a match of `tokens` may claim: one, except where several blocks begin equally well."""
        whole = 0
        path = []
        while (namespace, *tokens[: whole + self.size]) in self.blocks and whole + self.size <= len(tokens):
            whole += self.size
            path.append(self.blocks[namespace, *tokens[:whole]])
        alike = [(common(run[whole:], tokens[whole:]), run) for run in self.siblings(namespace, tuple(tokens[:whole]))]
        most = max((shared for shared, _ in alike), default=0)
        claims = set()
        for shared, run in alike if most else ():
            if shared == most:
                ends = [whole + most, *range(whole, -1, -self.size)]
                claims.add(next(n for n in ends if self.resumes(n, [*path, self.blocks[namespace, *run]])))
        return claims or {next(n for n in range(whole, -1, -self.size) if self.resumes(n, path))}

    def resumes(self, tokens: int, path: list[tuple[int, ...]]) -> bool:
        for g, group in enumerate(self.world.groups):
            first = max(0, tokens - group.window + 1) if group.window else 0
            if any(path[p // self.size][g] == SCRATCH for p in range(first, tokens)):
                return False
        return True


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


GROUPS = st.sampled_from(
    [
        lambda size: (FULL,),
        lambda size: (FULL, window(7)),
        lambda size: (window(5), FULL, window(size + 1)),  # the last: the state of a recurrent layer
        lambda size: (window(6),),
        lambda size: (FULL, FULL),
    ]
)
NAMESPACES = st.sampled_from([b"", b"other"])


class Serving(RuleBasedStateMachine):
    """Sequences start, run, fork, are inserted whole and in part, end and are aborted; blocks are evicted, prefixes
    pinned, namespaces dropped, in any order."""

    @initialize(
        groups=GROUPS,
        size=st.integers(1, 8),
        policy=st.sampled_from(list(POLICIES)),
        num_blocks=st.sampled_from([10, 24, 60]),
    )
    def begin(self, groups, size, policy, num_blocks):
        self.evicted = []
        self.world = World(groups(size), num_blocks, size, policy, lambda *args: self.note_evicted(*args))
        self.tree = self.world.tree
        self.plain = Plain(self.world)
        self.texts: list[list[int]] = [[]]
        self.pins: dict[tuple, float] = {}
        self.now = 0.0

    def note_evicted(self, block, index, ids):
        size = self.world.block_size
        tokens = unpack_ids(block.ids)
        assert len(tokens) == size and any(ids)
        for g, b in enumerate(ids):
            if b:
                assert self.tree.pools[g].is_idle(b)
                namespace, *run = self.world.written[g][b][-1]
                assert run[index * size :] == tokens and namespace == block.namespace
                assert block.key == chain(namespace, pack_ids(run), size)[-1].key
                self.evicted.append((g, b))

    def text(self, data) -> list[int]:
        base = data.draw(st.sampled_from(self.texts))
        cut = data.draw(st.just(0) | st.integers(0, len(base)))
        text = base[: len(base) - cut] + data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=14))
        self.texts.append(text)
        return text

    def run(self, data) -> Run:
        return data.draw(st.sampled_from(self.world.runs))

    @rule(data=st.data(), namespace=NAMESPACES, cached=st.sampled_from([True, True, False]), end=st.booleans())
    def start(self, data, namespace, cached, end):
        run = self.world.start(namespace, self.text(data), cached)
        while run.computed < len(run.tokens) and self.compute_some(run, data):
            pass
        if end and len(self.world.runs) > 1:
            self.insert_run(run)
            self.world.end(run)

    @precondition(lambda self: self.world.runs)
    @rule(data=st.data())
    def go_on(self, data):
        run = self.run(data)
        if run.computed == len(run.tokens):
            run.tokens = run.tokens + data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
        self.compute_some(run, data)

    def compute_some(self, run, data) -> bool:
        """Computes a chunk, as far as there is room."""
        num_tokens = data.draw(st.integers(run.computed + 1, len(run.tokens)))
        done = self.plain_evictions(lambda: self.world.compute(run, num_tokens))
        if data.draw(st.booleans()):
            self.insert_run(run)
        if data.draw(st.booleans()):
            run.blocks.trim(run.computed)
        return done

    def insert_run(self, run, priority=0):
        self.plain.insert(run.namespace, run.tokens[: run.computed], [t.ids for t in run.blocks.tables])
        self.world.insert(run, priority)
        if all(not g.window for g in self.world.groups):
            assert self.world.cached(run.tokens[: run.computed], run.namespace) == run.computed

    @precondition(lambda self: self.world.runs)
    @rule(data=st.data(), priority=st.integers(0, 2))
    def insert(self, data, priority):
        run = self.run(data)
        self.insert_run(run, priority)

    @precondition(lambda self: self.world.runs)
    @rule(data=st.data(), insert=st.booleans())
    def end(self, data, insert):
        run = self.run(data)
        if insert:
            self.insert_run(run)
        self.world.end(run)

    @precondition(lambda self: any(run.joined for run in self.world.runs))
    @rule(data=st.data())
    def fork(self, data):
        run = data.draw(st.sampled_from([run for run in self.world.runs if run.joined]))
        tokens = run.tokens[: run.computed] + data.draw(st.lists(st.integers(0, 2), max_size=5))
        twin = Run(run.namespace, tokens, self.world.tables(), run.computed)
        for table, shared in zip(twin.blocks.tables, run.blocks.tables, strict=True):
            table.adopt(shared.ids[: blocks_for(run.computed, self.world.block_size)])
        self.world.runs.append(twin)

    def plain_evictions(self, act) -> bool:
        """What `act` evicts leaves the plain model, too: only what the tree alone held, and what was below that."""
        idle = [
            {b for key, blocks in self.plain.blocks.items() if (b := blocks[g]) and pool.is_idle(b)}
            for g, pool in enumerate(self.tree.pools)
        ]
        available = [pool.available for pool in self.tree.pools]
        held = [{b for r in self.world.runs for b in r.blocks.tables[g].ids if b} for g in range(len(idle))]
        self.evicted = []
        done = act()
        left = self.world.entries()
        for key, blocks in self.plain.blocks.items():
            for g, (block, now) in enumerate(zip(blocks, left.get(key, (0,) * len(blocks)), strict=True)):
                assert now in (block, SCRATCH), "another block is there"
                assert now or not block or block in idle[g] or block in held[g]
        assert left.keys() <= self.plain.blocks.keys()
        assert all(b in idle[g] for g, b in self.evicted) and len(set(self.evicted)) == len(self.evicted)
        if not done:
            assert [pool.available for pool in self.tree.pools] == available
        self.plain.blocks = left
        return done

    @rule(data=st.data(), n=st.sampled_from([1, 2, 5, 1000]))
    def evict(self, data, n):
        group = data.draw(st.integers(0, len(self.tree.pools) - 1))
        pool = self.tree.pools[group]
        idle, free = pool.idle, pool.free

        def act():
            freed = self.tree.evict(group, n)
            assert freed == pool.free - free and freed >= min(n, idle)

        self.plain_evictions(act)

    @rule(data=st.data(), namespace=NAMESPACES)
    def match(self, data, namespace):
        text = self.text(data)
        limit = data.draw(st.none() | st.integers(0, len(text)))
        hit = self.tree.match(namespace, pack_ids(text), limit)
        self.world.verify(hit, namespace, text)
        assert hit.tokens in self.plain.expected(namespace, text[: len(text) if limit is None else limit])

    @rule(data=st.data(), namespace=NAMESPACES, ttl=st.integers(1, 5))
    def pin(self, data, namespace, ttl):
        text = self.text(data)
        pinned = self.tree.pin(namespace, pack_ids(text), self.now + ttl)
        assert pinned % self.world.block_size == 0
        if pinned:
            key = (namespace, *text[:pinned])
            self.pins[key] = max(self.pins.get(key, 0.0), self.now + ttl)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds):
        self.now += seconds
        self.tree.expire(self.now)
        self.pins = {key: until for key, until in self.pins.items() if until > self.now}
        assert len(self.tree._pins) == len(self.pins)

    @precondition(lambda self: len(self.texts) % 4 == 0)
    @rule(namespace=NAMESPACES, everything=st.sampled_from([False] * 5 + [True]))
    def drop(self, namespace, everything):
        self.tree.clear() if everything else self.tree.drop(namespace)
        for model in (self.plain.blocks, self.pins):
            for key in [key for key in model if everything or key[0] == namespace]:
                del model[key]

    @invariant()
    def adds_up(self):
        self.world.check()
        entries = self.world.entries()
        assert entries == self.plain.blocks
        for (namespace, *run), blocks in entries.items():
            for g, block in enumerate(blocks):
                size = self.world.block_size
                for p in range((len(run) - 1) // size * size, len(run)):
                    assert not block or self.world.written[g][block][p % size] == (namespace, *run[: p + 1]), "stale"
        for namespace, *run in self.pins:
            assert self.world.cached(run, namespace) == len(run), "a pinned prefix was evicted"

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.tree.expire(inf)
        for run in list(self.world.runs):
            self.world.end(run)
        for g, pool in enumerate(self.tree.pools):
            assert pool.used == 0
            self.tree.evict(g, pool.total)
            assert pool.free == pool.total
        self.world.check()
        assert self.tree.stats().nodes == 0 and not self.tree._roots


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -- what goes first -------------------------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    return [ord(c) for c in text]


@pytest.mark.parametrize(
    ("policy", "gone"),
    [("lru", "bbbb"), ("lfu", "cccc"), ("fifo", "aaaa"), ("priority", "aaaa")],
)
def test_policies_choose(policy, gone):
    world = World(policy=policy)
    for text, priority in (("aaaa", 0), ("bbbb", 1), ("cccc", 2)):
        world.serve(letters(text), priority=priority)
    for text in ("bbbb", "bbbb", "aaaa", "aaaa", "cccc"):  # last used: b, a, c; fewest hits: c; lowest priority: a
        world.tree.use(world.tree.match(b"", pack_ids(letters(text))))
    assert world.tree.evict(0, 1) == 1
    assert [t for t in ("aaaa", "bbbb", "cccc") if not world.cached(letters(t))] == [gone]
    world.check()


def test_branches_go_before_their_stem_and_each_from_its_end():
    world = World()
    world.serve(letters("stemstemaaaabb"))
    world.serve(letters("stemstemcccc"))
    assert world.tree.stats().nodes == 3
    left = []
    while world.tree.evict(0, 1):
        left.append((world.cached(letters("stemstemaaaabb")), world.cached(letters("stemstemcccc"))))
        world.check()
    assert left == [(12, 12), (8, 12), (8, 8), (4, 4), (0, 0)]
    assert world.tree.stats().evicted == 5 and world.tree.stats().nodes == 0


def test_what_is_evicted_is_named_by_its_chain_before_it_goes():
    seen = []
    world = World(on_evict=lambda block, index, ids: seen.append((block, index, world.pools[0].is_idle(ids[0]))))
    text = letters("one two three four five")
    world.serve(text, b"tenant")
    world.serve(text[:9] + letters("nine"), b"tenant")  # splits: the digests of both parts stay right
    world.tree.evict(0, 100)
    names = chain(b"tenant", pack_ids(text), 4)
    assert [b for b, _, _ in seen if b in names] == names[::-1]
    assert all(idle for _, _, idle in seen)
    assert [i for b, i, _ in seen if b in names] == [4, 3, 2, 1, 0]
    assert len(seen) == len(names) + 1, "the partly filled blocks have no name"


def test_a_chain_known_before_a_split_is_right_after_it():
    seen = []
    world = World(on_evict=lambda block, index, ids: seen.append(block))
    text = letters("aaaabbbbccccddddeeee")
    world.serve(text)
    world.tree.evict(0, 1)  # the names of all blocks before the last are known now
    world.serve(text[:12] + letters("else"))
    world.check()
    world.tree.evict(0, 100)
    assert set(chain(b"", pack_ids(text), 4)) < set(seen) and len(seen) == 6


def test_an_idle_block_above_held_ones_can_be_had():
    """Two compute the same beginning at once; the tree keeps the first one's, the second one goes on below it."""
    world = World(num_blocks=8)
    first, second = (world.start(b"", letters("same" * 2 + tail)) for tail in ("", "more" * 2))
    assert world.compute(first, 8) and world.compute(second, 16)
    for run in (first, second):
        world.insert(run)
    world.end(first)
    assert world.pools[0].idle == 2 and world.cached(second.tokens) == 16
    assert world.tree.evict(0, 1) == 1
    world.check()
    assert world.cached(second.tokens) == 4, "what the second holds is let go, and its own again"
    world.insert(second)
    world.check()
    assert world.cached(second.tokens) == 16
    world.end(second)
    world.check()
    assert world.tree.evict(0, 100) == 4 and world.pools[0].free == 7


# -- kinds that remember less ----------------------------------------------------------------------------------


def test_a_window_is_claimed_only_where_it_is_whole():
    world = World((FULL, window(8)))
    run = world.start(b"", letters("abcdefghijklmnopqrst"))
    assert world.compute(run, 20)
    run.blocks.trim(20)
    world.insert(run)
    world.end(run)
    world.check()
    assert world.cached(letters("abcdefghijklmnopqrstuv")) == 20
    assert world.cached(letters("abcdefghijklmnop")) == 0, "its window is gone"
    world.serve(letters("abcdefghijklmnop"))  # computed anew, the full blocks stay, the window's are filled in
    assert world.cached(letters("abcdefghijklmnop")) == 16
    assert world.pools[0].cached == world.pools[1].cached == 5


def test_the_middle_of_a_window_group_goes_before_any_end():
    world = World((FULL, window(8)), num_blocks=40)
    texts = [letters(c * 40) for c in "ab"]
    for text in texts:
        world.serve(text)
    ends = {world.entries()[b"", *text[:n]][1] for text in texts for n in (32 + 4, 40)}
    for _ in range(2 * (10 - 2)):
        assert world.tree.evict(1, 1) == 1
    assert world.pools[0].cached == 20 and world.pools[1].cached == 4
    assert all(world.cached(text) == 40 and world.cached(text[:39]) == 39 for text in texts)
    assert ends <= {blocks[1] for blocks in world.entries().values()}
    world.tree.evict(1, 1)
    assert [world.cached(text[:39]) for text in texts] == [0, 39], "the older first"
    world.check()


def test_a_split_where_window_blocks_are_gone():
    world = World((FULL, window(8)), num_blocks=40)
    world.serve(letters("a" * 40))
    assert world.tree.evict(1, 5) + world.tree.evict(1, 1) == 6  # the second looks where the first has been
    world.serve(letters("a" * 16 + "b" * 8))
    world.check()
    assert world.cached(letters("a" * 40)) == 40 and world.cached(letters("a" * 16 + "b" * 8)) == 24
    world.tree.evict(1, 100)
    world.check()
    assert world.pools[1].free == 39


def test_a_state_resumes_inside_a_block_from_the_block_before():
    world = World((FULL, window(5)))
    world.serve(letters("abcdefghijkl"))
    assert world.cached(letters("abcdefghijxx")) == 10
    hit = world.tree.match(b"", pack_ids(letters("abcdefghij")))
    assert [bool(b) for b in hit.blocks[1]] == [False, True, True]


def test_window_groups_alone_leave_no_husks():
    world = World((window(6),), num_blocks=30)
    for i in range(20):
        world.serve([i, *range(100, 130)])
    world.tree.evict(0, 1000)
    world.check()
    assert world.tree.stats().nodes == 0 and world.pools[0].free == 29


# -- prefixes that stay and that must not ----------------------------------------------------------------------


def test_a_pinned_prefix_outlives_a_storm():
    world = World(num_blocks=12)
    world.serve(letters("system prompt"))
    assert world.tree.pin(b"", pack_ids(letters("system prompt")), until=10.0) == 12
    assert world.tree.pin(b"", pack_ids(letters("never seen")), until=10.0) == 0
    for i in range(20):
        world.serve([i] * 20)
    assert world.cached(letters("system prompt")) == 12
    assert world.pools[0].available == 8
    world.tree.expire(9.9)
    assert world.tree.stats().pinned == 3
    world.tree.expire(10.0)
    assert world.tree.stats().pinned == 0 and world.pools[0].available == 11
    world.check()


def test_a_second_pin_only_prolongs():
    world = World()
    world.serve(letters("abcd"))
    for until in (5.0, 10.0, 7.0):
        assert world.tree.pin(b"", pack_ids(letters("abcd")), until) == 4
    world.tree.expire(9.0)
    assert world.tree.stats().pinned == 1
    world.tree.expire(inf)
    assert world.tree.stats().pinned == 0


def test_a_dropped_namespace_is_found_no_more_though_held():
    world = World()
    world.serve(letters("shared text"), b"a")
    world.serve(letters("shared text"), b"b")
    run = world.start(b"a", letters("shared text goes on"))
    assert run.computed == 11
    world.tree.drop(b"a")
    world.check()
    assert world.cached(letters("shared text"), b"a") == 0 and world.cached(letters("shared text"), b"b") == 11
    world.end(run)
    world.check()
    assert world.pools[0].cached == 3 and world.pools[0].free == 31 - 3


def test_namespaces_never_meet():
    world = World()
    assert world.serve(letters("secret"), b"a") == 0
    assert world.serve(letters("secret"), b"b") == 0
    assert world.serve(letters("secret"), b"a") == 5


# -- partly filled blocks --------------------------------------------------------------------------------------


def test_a_conversation_goes_on_inside_a_block():
    world = World()
    text = letters("hello")
    assert world.serve(text) == 0
    for answer in ("you", "! How", " are"):
        text = text + letters(answer)
        assert world.serve(text) == len(text) - len(answer)
    assert world.tree.stats().nodes == 1, "one run"
    assert world.serve(letters("hello yo")) == 5, "leaves inside the second block"
    assert world.tree.stats().nodes == 3


def test_a_run_that_holds_more_replaces_one_that_holds_less():
    world = World()
    world.serve(letters("abcdef"))
    short = world.entries()[b"", *letters("abcdef")]
    world.serve(letters("abcdefg"), use=False)
    assert world.cached(letters("abcdefgh")) == 7
    assert world.pools[0].cached == 2 and short not in world.entries().values()


def test_many_branches_inside_the_first_block():
    world = World(num_blocks=300)
    for i in range(200):
        world.serve([7, i % 10, i])
    for i in range(200):
        assert world.cached([7, i % 10, i, 1]) == 3
        assert world.cached([7, i % 10, 999]) == 2
    assert world.cached([8]) == 0


# -- small parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 31, 1000])
def test_common_counts_whole_ids(length):
    ids = list(range(length))
    assert num_equal(pack_ids(ids), pack_ids(ids)) == length
    for i in {0, length // 2, length - 1} & set(range(length)):
        other = [*ids[:i], ids[i] ^ 0x01000000, *ids[i + 1 :]]  # only the last byte differs
        assert num_equal(pack_ids(ids), pack_ids(other)) == i
    assert num_equal(pack_ids(ids), pack_ids(ids[: length // 2])) == length // 2


def test_queues_do_not_keep_the_dead():
    world = World((FULL, window(6)), num_blocks=40)
    for i in range(3000):
        world.serve([i])
        world.tree.drop(b"")
    evictor = world.tree._evictor
    assert max(len(q) for q in (evictor._leaves, *evictor._middles.values(), *evictor._ends.values())) < 1100
