"""The prefix tree: what it evicts first, what it claims of windows and states, what stays pinned."""

import gc
from math import inf

import pytest

from kvasir.caches import Cross
from kvasir.kv.node import PrefixNode, common
from kvasir.kv.tiers.block import chain
from kvasir.plan import pack_ids
from tests.kv._prefixes import FULL, World, letters, of, window

# -- what goes first -------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("policy", ["lfu", "priority"])
def test_both_parts_of_a_split_keep_their_rank(policy):
    world = World(policy=policy)
    world.serve(letters("stemtail"), priority=2)
    world.serve(letters("next"), priority=2)
    for text in ("stemtail", "stemtail", "next", "next"):
        world.tree.use(world.tree.match(b"", pack_ids(letters(text))))
    world.serve(letters("stemmore"), use=False)
    found = [letters(text) for text in ("stemmore", "stemtail", "next")]
    for left in ([4, 8, 4], [4, 4, 4], [4, 4, 0]):  # the stem was used last
        assert world.tree.evict(0, 1) == 1
        assert [world.cached(text) for text in found] == left


def test_a_leaf_that_was_held_takes_its_turn_again():
    world = World(policy="fifo")
    first, second = letters("aaaabbbb"), letters("ccccdddd")
    world.serve(first)
    world.serve(second)
    holder = world.start(b"", [*first, 1])
    assert world.tree.evict(0, 1) == 1
    assert (world.cached(first), world.cached(second)) == (8, 4)
    world.end(holder)
    assert world.tree.evict(0, 1) == 1
    assert (world.cached(first), world.cached(second)) == (4, 4)


def test_blocks_are_named_by_their_last_use_but_none_before_the_one_that_it_follows():
    world = World()
    for text in ("stemolder", "stemnewer", "last"):
        world.serve(letters(text))
    world.serve([*letters("mark"), -2, 1, 1, 1, *letters("more")])
    older, newer, last, marked = (
        chain(b"", pack_ids(letters(text)), 4) for text in ("stemolde", "stemnewe", "last", "mark")
    )
    assert [name for name, _, _ in world.tree.named()] == [*marked, *last, *newer, older[1]]


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


def test_evicted_blocks_are_reported_with_their_chain():
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


def test_a_cached_chain_stays_valid_after_a_split():
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
    """Two sequences compute the same prefix at once; the tree keeps the first one's blocks, and the second one's
    continuation is inserted below them."""
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
    entries = world.entries()
    left = [bool(entries[b"", *letters("a" * end)][1]) for end in range(4, 44, 4)]
    assert left == [False] * 6 + [True] * 4, "the first blocks go first"
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


def test_a_prefix_is_no_hit_without_the_blocks_that_all_positions_read():
    world = World((of(Cross(length=8)), FULL))
    text = letters("abcdefghi")
    assert [world.serve(text), world.serve(text)] == [0, 8]
    assert world.tree.evict(0, 100) == 2
    assert world.cached(text) == 0
    assert [world.serve(text), world.serve(text)] == [0, 8]


def test_window_groups_alone_leave_no_husks():
    world = World((window(6),), num_blocks=30)
    for i in range(20):
        world.serve([i, *range(100, 130)])
    world.tree.evict(0, 1000)
    world.check()
    assert world.tree.stats().nodes == 0 and world.pools[0].free == 29


# -- prefixes that stay and that must not ----------------------------------------------------------------------


def test_a_pinned_prefix_survives_many_evictions():
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
    for namespace in (b"a", b"b"):
        world.tree.pin(namespace, pack_ids(letters("shared text")), until=10.0)
    run = world.start(b"a", letters("shared text goes on"))
    assert run.computed == 11
    world.tree.drop(b"a")
    world.check()
    assert world.tree.stats().pinned == 2, "the pins of the other namespace stay"
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


def test_a_conversation_continues_inside_a_block():
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
    assert common(pack_ids(ids), pack_ids(ids)) == length
    for i in {0, length // 2, length - 1} & set(range(length)):
        other = [*ids[:i], ids[i] ^ 0x01000000, *ids[i + 1 :]]  # only the last byte differs
        assert common(pack_ids(ids), pack_ids(other)) == i
    assert common(pack_ids(ids), pack_ids(ids[: length // 2])) == length // 2


def nodes_in_memory() -> int:
    gc.collect()
    return sum(isinstance(found, PrefixNode) for found in gc.get_objects())


def test_eviction_queues_drop_removed_nodes():
    before = nodes_in_memory()
    world = World((FULL, window(6)), num_blocks=40)
    for i in range(1500):
        world.serve([i])
        world.tree.drop(b"")
    assert nodes_in_memory() - before < 1100
