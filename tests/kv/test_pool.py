"""BlockPool and tables: counts always add up."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir.caches import attention
from kvasir.kv.blocks import BlockTable
from kvasir.kv.pool import BlockPool
from tests.examples import examples


def test_scratch_is_never_given_out():
    pool = BlockPool(8)
    assert 0 not in pool.take(7)
    with pytest.raises(AssertionError):
        pool.take(1)


def test_faults_are_noticed():
    pool = BlockPool(8)
    blocks = pool.take(3)
    pool.check([blocks])
    for wrong in ([], [blocks, blocks], [blocks[:2]]):
        with pytest.raises(AssertionError):
            pool.check(wrong)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks[:1])
    with pytest.raises(AssertionError):
        pool.share(blocks[:1])


def test_a_cached_block_is_idle_when_no_sequence_holds_it():
    pool = BlockPool(8)
    held, cached = pool.take(2)
    pool.keep([cached, 0])
    assert (pool.idle, pool.used, pool.available, pool.cached) == (0, 2, 5, 1)
    pool.release([cached])
    assert (pool.idle, pool.used, pool.available, pool.free) == (1, 1, 6, 5)
    assert pool.is_idle(cached) and not pool.is_idle(held) and not pool.is_idle(0)
    pool.check([[held]], [[cached, 0]])
    pool.share([cached])
    assert pool.idle == 0
    pool.forget([cached])
    assert (pool.idle, pool.used, pool.free) == (0, 2, 5)
    pool.keep([cached])
    pool.release([cached])
    pool.forget([cached])
    pool.check([[held]])


def test_faults_of_the_cache_are_noticed():
    pool = BlockPool(8)
    held, idle = pool.take(2)
    pool.keep([idle])
    pool.release([idle])
    for wrong in (
        lambda: pool.release([idle]),
        lambda: pool.keep([idle]),
        lambda: pool.forget([held]),
        lambda: pool.keep([7]),
        lambda: pool.check([[held]]),
        lambda: pool.check([[held], [idle]]),
        lambda: pool.check([[held]], [[idle], [idle]]),
        lambda: pool.check([[held]], [[held, idle]]),
    ):
        with pytest.raises(AssertionError):
            wrong()
    pool.check([[held]], [[idle]])


class Tables(RuleBasedStateMachine):
    """Tables grow, fork, own, trim and are released in any order; the pool's counts match the live tables."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(24)
        self.tables: list[list] = []  # [table, tokens]

    @rule(tokens=st.integers(1, 60), window=st.sampled_from([0, 0, 20]))
    def new(self, tokens, window):
        table = BlockTable(self.pool, 8, attention(1, 1, window))
        if table.missing(tokens) <= self.pool.free:
            table.extend(tokens)
            self.tables.append([table, tokens])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        table, tokens = data.draw(st.sampled_from(self.tables))
        kept = tokens if table.kind.window else data.draw(st.integers(1, tokens))
        twin = BlockTable(self.pool, 8, table.kind)
        twin.adopt(table.ids[: -(-kept // 8)])
        if self.pool.free:
            before = list(twin.ids)
            pair = twin.make_own(kept)
            assert (pair is None) == (kept % 8 == 0)
            if pair:
                assert before[kept // 8] == pair[0] != pair[1] == twin.ids[kept // 8]
        self.tables.append([twin, kept])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def trim(self, data):
        table, tokens = data.draw(st.sampled_from(self.tables))
        table.trim(tokens)
        if table.kind.window:
            live = [p for p in range(tokens) if table.ids[p // 8]]
            assert all(p in live for p in range(max(0, tokens - table.kind.window + 1), tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def drop(self, data):
        i = data.draw(st.integers(0, len(self.tables) - 1))
        self.tables.pop(i)[0].release()

    @invariant()
    def adds_up(self):
        self.pool.check([t.ids for t, _ in self.tables])


TestTables = Tables.TestCase
TestTables.settings = examples(60, stateful_step_count=30, deadline=None)
