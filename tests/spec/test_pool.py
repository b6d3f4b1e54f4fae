"""Suffix decoding from a key's earlier answers."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvasir.spec.pool import LEAST, Pool, Pools

answers = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=6)


def best(kept: list[list[int]], ids: list[int]) -> int:
    """The longest match of the end of ids that something follows in an answer."""
    found = 0
    for answer in kept:
        for end in range(LEAST, len(answer)):
            length = 0
            while length < min(end, len(ids)) and answer[end - 1 - length] == ids[-1 - length]:
                length += 1
            found = max(found, length)
    return found if found >= LEAST else 0


@given(answers, st.lists(st.integers(0, 3), max_size=8))
def test_a_guess_continues_a_match(kept, ids):
    pool = Pool(256)
    for answer in kept:
        pool.add(answer)
    found, length = pool.continuation(array("i", ids), 4)
    assert length <= best(kept, ids)
    if found:
        end = ids[-length:] + list(found)
        assert any(end == answer[i : i + len(end)] for answer in kept for i in range(len(answer)))
    else:
        assert length == 0


@given(st.lists(st.integers(0, 50), min_size=6, max_size=40, unique=True))
def test_an_answer_is_found_again(ids):
    pool = Pool(256)
    pool.add(ids)
    for at in range(LEAST, len(ids)):
        assert list(pool.continuation(array("i", ids[:at]), 99)[0]) == ids[at:]


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=30), min_size=20, max_size=40))
def test_only_the_latest_ids_are_kept(kept):
    pool = Pool(64)
    for answer in kept:
        pool.add(answer)
        found, length = pool.continuation(array("i", answer[: len(answer) - 1]), 8)
        assert len(found) <= 8 and (not found or length >= LEAST)
    assert len(pool._ids) == len(pool._earlier) == len(pool._latest) == 64


def test_an_answer_longer_than_the_ring_leaves_its_end():
    pool = Pool(64)
    pool.add(list(range(1000)))
    assert list(pool.continuation(array("i", [990, 991, 992]), 3)[0]) == [993, 994, 995]
    assert not pool.continuation(array("i", [10, 11, 12]), 3)[0]


@given(answers, st.integers(1, 7))
def test_answers_in_parts_are_as_those_at_once(kept, most):
    pools, pool = Pools(size=256), Pool(256)
    for answer in kept:
        pools.add(("a", ""), answer)
        pool.add(answer)
    while pools.waiting:
        assert 0 < pools.index(most) <= most
    found = pools.of(("a", ""))
    if found is None:
        assert pool._end == 0
    else:
        assert (found._ids, found._earlier, found._latest) == (pool._ids, pool._earlier, pool._latest)


def test_too_many_waiting_answers_are_dropped(monkeypatch):
    monkeypatch.setattr("kvasir.spec.pool.WAITING", 100)
    pools = Pools()
    pools.add(("a", ""), list(range(50)))
    pools.index(10)
    for _ in range(5):
        pools.add(("b", ""), list(range(60, 100)))
        assert pools.waiting <= 80
    assert pools.index(1000) == 80 and not pools.waiting
    found = pools.of(("a", ""))
    assert found and list(found.continuation(array("i", [1, 2, 3]), 99)[0]) == list(range(4, 50))


def test_keys_do_not_see_each_other_and_few_are_kept():
    pools = Pools(keys=2, size=64)
    for key in "abc":
        pools.add((key, ""), [ord(key), 1, 2, 3, 4])
    assert pools.waiting == pools.index(100) == 15 and not pools.waiting
    assert pools.of(("a", "")) is None
    pool = pools.of(("b", ""))
    assert pool and list(pool.continuation(array("i", [1, 2, 3]), 9)[0]) == [4]
    assert pools.of(("b", "salt")) is None
