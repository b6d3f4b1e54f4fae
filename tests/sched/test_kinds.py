"""Any mix of cache kinds under the scheduler: what is evicted goes to a tier and comes back, answers share what they
begin with, and each is that of its request alone."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvasir.caches import CacheKind, Cross, Latent, PagedKV, State, Window
from kvasir.kv.tiers.block import GroupFacts, StoreFacts
from kvasir.plan import StepPlan
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from tests.examples import examples
from tests.kv.chunked import Chunked
from tests.sched.drive import Drive, adapter, adapter_pool, by_hand, request
from tests.sched.test_together import ShakyTier

SIZE, VOCAB, LENGTH = 8, 256, 128
GROWING = st.one_of(
    st.just(PagedKV()),
    st.just(Latent()),
    st.just(State()),
    st.builds(Window, window=st.integers(1, 40)),
    st.builds(Chunked, chunk=st.integers(1, 40)),
)
MIXES = st.lists(GROWING | st.builds(Cross, length=st.integers(1, 30)), max_size=3).flatmap(
    lambda kinds: GROWING.flatmap(lambda kind: st.permutations([*kinds, kind]).map(tuple))
)


class Engine:
    """One scheduler over a FakeRunner of these kinds; what it saved and loaded, by group."""

    def __init__(self, kinds: tuple[CacheKind, ...], num_blocks: int, tier: ShakyTier | None = None, **options):
        self.runner = FakeRunner(
            kinds=kinds, block_size=SIZE, num_blocks=num_blocks, max_model_len=LENGTH, max_tokens_per_step=24,
            fault=self.note,
        )  # fmt: skip
        self.scheduler = Scheduler(self.runner.capacity, tier=tier, clock=lambda: 0.0, **options)
        self.scheduler.service.prefill_seconds = lambda start, tokens: 20.0  # type: ignore[method-assign]
        self.drive, self.moved = Drive(self.scheduler, self.runner), Counter()

    def note(self, plan: StepPlan) -> None:
        self.moved.update(("saved", group) for group, _ in plan.saves)
        self.moved.update(("loaded", group) for group, *_ in plan.loads)

    def answer(self, id: str, prompt: list[int], **params) -> int:
        """Serves one request to its end; returns how many tokens it found in the cache."""
        asked, before = request(id, prompt, **params), self.scheduler.cached_tokens
        self.scheduler.add(asked)
        self.drive.drain()
        for i, expected in enumerate(by_hand(asked, VOCAB, LENGTH)):
            assert self.drive.tokens[id, i] == expected
        self.scheduler.check()
        return self.scheduler.cached_tokens - before


def facts(kinds: tuple[CacheKind, ...]) -> StoreFacts:
    capacity = FakeRunner(kinds=kinds, block_size=SIZE).capacity
    groups = tuple(GroupFacts(g.kind.name, g.bytes_per_block) for g in capacity.groups)
    return StoreFacts("fake", "1", SIZE, groups)


@examples(20)
@given(MIXES, st.integers(20, 60), st.integers(1, 30), st.integers(1, 30))
def test_a_prefix_hit_continues_like_a_fresh_run(kinds, shared, one, other):
    """The tokens are compared with those by hand, and the fake looks at all that a row can reach."""
    engine = Engine(kinds, num_blocks=60)
    begin = [(5 * i + 1) % VOCAB for i in range(shared)]
    assert engine.answer("a", [*begin, *range(one)], n=2, temperature=1.0, seed=3) == 0
    found = engine.answer("b", [*begin, *range(100, 100 + other)], n=2)
    assert found or any(kind.forgets for kind in kinds), "what all groups keep is a hit"
    again = engine.answer("c", [*begin, *range(one)])
    assert again >= len(begin) + one - 1 - SIZE or any(kind.forgets for kind in kinds)


@examples(20)
@given(MIXES, st.integers(33, 70))
def test_evicted_blocks_come_back_from_a_tier(kinds, length):
    """The parts of all groups are saved, and loaded if needed, including those of a fixed group."""
    tier = ShakyTier(random.Random(length), facts(kinds), bad=0.0)
    engine = Engine(kinds, num_blocks=1 + max(kind.blocks(LENGTH, SIZE) for kind in kinds), tier=tier)
    prompt = [(3 * i + 2) % VOCAB for i in range(length)]
    engine.answer("first", prompt)
    for i in range(4):
        engine.answer(f"other {i}", [(7 * j + i) % VOCAB for j in range(100)])
    engine.scheduler.kv.tree.evict(0, 1000)
    [engine.scheduler.kv.tree.evict(g, 1000) for g in range(len(kinds))]
    engine.answer("flush", [1, 2, 3])
    saved = {group for (what, group), n in engine.moved.items() if what == "saved"}
    assert saved == set(range(len(kinds)))
    engine.moved.clear()
    engine.answer("again", prompt)
    loaded = {group for (what, group), n in engine.moved.items() if what == "loaded"}
    assert loaded == set(range(len(kinds))), "every group has what it needs"
    assert engine.scheduler.loaded_tokens >= length - 1 - 2 * SIZE or any(kind.forgets for kind in kinds)


@examples(15)
@given(MIXES, st.lists(st.integers(0, 2), min_size=4, max_size=12), st.booleans(), st.integers(1, 9))
def test_batched_answers_equal_single_ones(kinds, which, ahead, period):
    """Tiny pools: sequences wait for blocks, and are preempted. The prefix cache is reset every `period` steps."""
    runner = FakeRunner(
        kinds=kinds, block_size=SIZE, max_model_len=LENGTH, max_tokens_per_step=24, max_rows=4,
        num_blocks=2 + max(kind.blocks(LENGTH, SIZE) for kind in kinds),
    )  # fmt: skip
    scheduler = Scheduler(runner.capacity)
    drive, asked = Drive(scheduler, runner, ahead), []
    for i, text in enumerate(which):
        prompt = [(11 * text + 5 * j) % VOCAB for j in range(30 + 3 * i)]
        asked.append(request(f"r{i}", prompt, max_tokens=20, temperature=1.0, seed=i))
        scheduler.add(asked[-1])
        for _ in range(3):
            drive.step()
            if len(drive.plans) % period == 0:
                scheduler.kv.tree.clear()
                scheduler.check()
        if i % 3 == 2 and scheduler.running and not ahead:
            scheduler.preempt(scheduler.running[0])
    drive.drain()
    for one in asked:
        assert drive.tokens[one.id, 0] == by_hand(one, VOCAB, LENGTH)[0]
    scheduler.check()
    scheduler.kv.tree.clear()
    assert all(pool.free == pool.total for pool in scheduler.kv.pools)


def test_fixed_blocks_belong_to_their_namespace():
    """Sequences of one namespace share an encoder's output; sequences of another namespace never read it."""
    runner = FakeRunner(kinds=(PagedKV(), Cross(length=20)), block_size=SIZE, num_blocks=40)
    scheduler = Scheduler(runner.capacity, adapters=adapter_pool())
    drive = Drive(scheduler, runner)
    for name in (None, "x", None, "x"):
        one = request(f"{name} {len(drive.plans)}", list(range(30)))
        object.__setattr__(one, "adapters", (adapter(name),) if name else ())
        scheduler.add(one)
        drive.drain()
        assert drive.tokens[one.id, 0] == by_hand(one, VOCAB, 512)[0]
    assert scheduler.kv.pools[1].cached == 2 * 3 and scheduler.cached_tokens >= 2 * 24
    assert sum(first == 0 and len(ids) for plan in drive.plans for w in plan.works for first, ids in w.blocks[1:]) > 0
