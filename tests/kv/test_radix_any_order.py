"""The prefix tree under any order of what engines do: it finds what a plain dict of token runs says it must, no block
it gives holds other tokens than those asked for, no held block is evicted, and counts always add up."""

from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvasir.caches import Cross, Latent, State
from kvasir.kv.blocks import blocks_for
from kvasir.kv.policy import POLICIES
from kvasir.kv.pool import SCRATCH
from kvasir.kv.tiers.block import chain, fixed_chain
from kvasir.plan import pack_ids, unpack_ids
from tests.examples import examples
from tests.kv._prefixes import FULL, Run, World, of, window
from tests.kv.chunked import Chunked


class Plain:
    """What the tree must know, as a dict: (namespace, all ids up to the end of a block) -> its block in each group."""

    def __init__(self, world: World):
        self.world = world
        self.size = world.block_size
        self.blocks: dict[tuple, tuple[int, ...]] = {}
        self.fixed = {g for g, group in enumerate(world.groups) if group.kind.fixed}

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
            mine = tuple(SCRATCH if g in self.fixed else table[i] for g, table in enumerate(tables))
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
        root = next((root for root in self.world.roots() if root.namespace == namespace), None)
        if self.fixed and not (root and self.fixed <= root.fixed.keys()):
            return {0}
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
            if g in self.fixed:
                continue
            first = max(0, min(group.kind.low(tokens), tokens - 1))
            if any(path[p // self.size][g] == SCRATCH for p in range(first, tokens)):
                return False
        return True


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


GROUPS = st.sampled_from(
    [
        lambda size: (FULL,),
        lambda size: (FULL, window(7)),
        lambda size: (window(5), FULL, window(size + 1)),
        lambda size: (window(6),),
        lambda size: (FULL, FULL),
        lambda size: (of(State()), of(Latent())),
        lambda size: (of(Cross(length=2 * size)), FULL),
        lambda size: (window(6), of(Cross(length=3)), of(Chunked(chunk=5))),
        lambda size: (of(Chunked(chunk=size)), of(Latent())),
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
            if b and g in self.plain.fixed:
                assert self.tree.pools[g].is_idle(b)
                assert self.world.written[g][b][0] == (block.namespace, "fixed", index * size)
                assert block.key == fixed_chain(block.namespace, index + 1, size)[-1].key
                self.evicted.append((g, b))
            elif b:
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
        if not run.computed:  # there is nothing to insert, and tables that hold what all positions read are empty still
            return
        self.plain.insert(run.namespace, run.tokens[: run.computed], [t.ids for t in run.blocks.tables])
        self.world.insert(run, priority)
        if not any(g.kind.forgets or g.kind.fixed for g in self.world.groups):
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
            table.adopt(shared.ids[: shared.kind.blocks(run.computed, self.world.block_size)])
        self.world.runs.append(twin)

    def plain_evictions(self, act) -> bool:
        """What `act` evicts leaves the plain model, too: only what the tree alone held, and what was below that."""
        idle = [
            {b for key, blocks in self.plain.blocks.items() if (b := blocks[g]) and pool.is_idle(b)}
            for g, pool in enumerate(self.tree.pools)
        ]
        for g in self.plain.fixed:
            idle[g] = {b for r in self.world.roots() for b in r.fixed.get(g, ()) if self.tree.pools[g].is_idle(b)}
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
        left = {key: until for key, until in self.pins.items() if until > self.now}
        assert self.tree.expire(self.now) == len(self.pins) - len(left)
        self.pins = left

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
        assert self.tree.stats().nodes == 0 and not self.world.roots()


TestServing = Serving.TestCase
TestServing.settings = examples(60, stateful_step_count=40, deadline=None)
