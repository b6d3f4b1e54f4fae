"""The pool of adapters: bounded, never without what is in use, and no request waits forever."""

from __future__ import annotations

import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest, ModelFileError
from kvasir.inputs import Adapter
from kvasir.sched.adapters import MOST_LOADS, AdapterPool
from tests.examples import examples
from tests.sched.drive import adapter


class Loads:
    """Loads that end when a test says so. sizes: by content, if it differs from the file's."""

    def __init__(self) -> None:
        self.open: dict[str, Future] = {}
        self.sizes: dict[str, int] = {}
        self.begun: list[str] = []

    def begin(self, path: str, content: str) -> Future:
        self.begun.append(content)
        self.open[content] = Future()
        return self.open[content]

    def end(self, content: str, error: Exception | None = None) -> None:
        load = self.open.pop(content)
        load.set_exception(error) if error else load.set_result(SimpleNamespace(nbytes=self.sizes.get(content, 10)))

    def close(self) -> None: ...


def named(*names: str, nbytes: int = 10) -> tuple[Adapter, ...]:
    return tuple(adapter(name, content=name, nbytes=nbytes) for name in names)


class Turns:
    """Plans as the scheduler does: first come, first served, on so many rows."""

    def __init__(self, rows: int = 4, **options: Any):
        self.loads, self.rows = Loads(), rows
        self.pool = AdapterPool(self.loads, **{"ids": 2, "most_bytes": 1000, "most_held": 2, **options})
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.failed: list[tuple[Any, Exception]] = []
        self.installed: dict[int, str] = {}

    def add(self, *adapters: Adapter) -> Any:
        self.pool.refuse_impossible(adapters)
        seq: Any = SequenceLike(adapters)
        self.pool.enter(seq)
        self.waiting.append(seq)
        return seq

    def end(self, seq: Any) -> None:
        (self.running if seq in self.running else self.waiting).remove(seq)
        self.pool.leave(seq)

    def turn(self) -> list[Any]:
        """Returns those that joined."""
        for seq, error in self.pool.begin_turn():
            self.failed.append((seq, error))
            self.end(seq)
        joined = []
        for seq in list(self.waiting):
            if len(self.running) < self.rows and self.pool.ready(seq):
                seq.adapted = self.pool.join(seq)
                self.waiting.remove(seq)
                self.running.append(seq)
                joined.append(seq)
        self.pool.prefetch()
        for id, content in self.pool.take_changes():
            self.installed.pop(id, None)
            if content:
                assert self.pool.held(content) is not None
                self.installed[id] = content
        for seq in self.running:
            assert [self.installed[a.adapter] for a in seq.adapted] == [a.content for a in seq.content.adapters]
        self.pool.check(self.waiting, self.running)
        return joined

    def load_all(self) -> None:
        for content in list(self.loads.open):
            self.loads.end(content)


class SequenceLike:
    def __init__(self, adapters: tuple[Adapter, ...]):
        self.content = SimpleNamespace(adapters=adapters)
        self.adapted: Any = ()
        self.left = 0


def test_a_sequence_joins_once_its_adapter_is_loaded_and_others_overtake_it():
    turns = Turns()
    slow, plain = turns.add(*named("a")), turns.add()
    assert turns.turn() == [plain]
    assert turns.turn() == []
    turns.loads.end("a")
    assert turns.turn() == [slow]
    assert turns.add(*named("a")) in turns.turn() and turns.loads.begun == ["a"], "it is in memory"


def test_loads_begin_while_all_rows_are_taken():
    turns = Turns(rows=0)
    turns.add(*named("a"))
    turns.turn()
    assert turns.loads.begun == ["a"]


def test_the_least_recently_used_leaves_first_and_what_is_in_use_stays():
    turns = Turns(most_held=3, ids=3)
    for name in "abc":
        turns.add(*named(name))
        turns.turn()
        turns.load_all()
        turns.turn()
    a, b, c = turns.running
    for seq in (b, c):
        turns.end(seq)
    turns.add(*named("b"))
    turns.turn()
    turns.end(turns.running[-1])
    turns.add(*named("d"))
    turns.turn()
    turns.load_all()
    turns.turn()
    assert set(turns.installed.values()) == {"a", "b", "d"} and turns.pool.evictions == 1
    assert a in turns.running


def test_an_id_is_taken_from_an_adapter_that_stays_in_memory():
    turns = Turns(ids=1, most_held=4)
    for name in "aba":
        seq = turns.add(*named(name))
        turns.turn()
        turns.load_all()
        turns.turn()
        assert list(turns.installed.values()) == [name]
        turns.end(seq)
    assert turns.loads.begun == ["a", "b"] and turns.pool.evictions == 0


def test_what_an_earlier_sequence_of_the_turn_wants_is_not_evicted_for_a_later_one():
    turns = Turns(ids=1, most_held=1)
    first, second = turns.add(*named("a")), turns.add(*named("b"))
    for _ in range(3):
        turns.turn()
    assert turns.loads.begun == ["a"]
    turns.load_all()
    assert turns.turn() == [first]
    turns.end(first)
    turns.turn()
    turns.load_all()
    assert turns.turn() == [second]


@pytest.mark.parametrize(
    "limit", [{"ids": 2, "most_held": 2}, {"ids": 2, "most_held": 9}, {"most_bytes": 20, "most_held": 9}]
)
def test_a_sequence_claims_what_others_use_so_that_it_joins_at_last(limit):
    """Sequences with adapters in use come again and again, before those that run have ended."""
    turns = Turns(rows=4, **limit)
    running = [turns.add(*named(name)) for name in "ab"]
    for _ in range(3):
        turns.turn()
        turns.load_all()
    assert turns.running == running
    third = turns.add(*named("c"))
    for _ in range(10):
        turns.turn()
        turns.load_all()
        if third in turns.running:
            return
        turns.end(turns.running[0])
        turns.add(*named("b"))
        turns.add(*named("a"))
    raise AssertionError("it starves")


def test_one_that_needs_much_memory_is_not_overtaken_forever():
    turns = Turns(rows=8, ids=8, most_held=8, most_bytes=40)
    small = [turns.add(*named(name)) for name in "abcd"]
    for _ in range(4):
        turns.turn()
        turns.load_all()
    assert turns.running == small
    turns.loads.sizes["large"] = 35
    large = turns.add(*named("large", nbytes=35))
    for i in range(12):
        turns.turn()
        turns.load_all()
        if large in turns.running:
            return
        for seq in turns.running[:1]:
            turns.end(seq)
        turns.add(*named(f"s{i}"))
    raise AssertionError("it starves")


def test_a_failed_load_ends_only_its_sequences():
    turns = Turns()
    bad, good = [turns.add(*named("a")), turns.add(*named("a", "b"))], turns.add(*named("b"))
    turns.turn()
    turns.loads.end("a", ModelFileError("it has changed"))
    turns.load_all()
    assert turns.turn() == [good]
    assert [seq for seq, _ in turns.failed] == bad and "it has changed" in str(turns.failed[0][1])
    again = turns.add(*named("a"))
    turns.turn()
    turns.load_all()
    assert turns.turn() == [again], "the next request tries again"


def test_an_error_of_another_kind_is_shown_as_one_of_the_file():
    turns = Turns()
    turns.add(*named("a"))
    turns.turn()
    turns.loads.end("a", MemoryError("no memory"))
    turns.turn()
    assert "'a' cannot be loaded: no memory" in str(turns.failed[0][1])


def test_pinned_adapters_load_at_once_and_stay():
    turns = Turns()
    turns.pool.pin("a", "a", 10)
    assert turns.pool.due
    turns.turn()
    turns.load_all()
    for name in "bcd":
        seq = turns.add(*named(name))
        for _ in range(3):
            turns.turn()
            turns.load_all()
        turns.end(seq)
    assert turns.add(*named("a")) in turns.turn()
    assert turns.loads.begun.count("a") == 1
    turns.end(turns.running[0])
    turns.pool.drop("a")
    assert turns.pool.due
    turns.turn()
    assert "a" not in turns.installed.values() and not turns.pool.due and turns.pool.resident == 1


def test_an_adapter_that_lost_its_name_leaves_after_its_last_sequence():
    turns = Turns()
    seq = turns.add(*named("a"))
    turns.turn()
    turns.load_all()
    turns.turn()
    turns.pool.drop("a")
    turns.turn()
    assert turns.pool.resident == 1
    turns.end(seq)
    turns.turn()
    assert turns.pool.resident == 0 and not turns.installed


def test_requests_that_never_fit_are_refused():
    turns = Turns(most_bytes=25)
    for adapters, named_ in (
        (named("a", "b", "c"), "3"),
        (named("a", nbytes=26), "26 bytes"),
        ((Adapter("x"),), "'x'"),
    ):
        with pytest.raises(InvalidRequest, match=named_):
            turns.add(*adapters)
    with pytest.raises(InvalidRequest, match="no adapters"):
        AdapterPool().refuse_impossible(named("a"))


def test_a_pin_ends_sequences_that_can_never_join_beside_it():
    turns = Turns()
    both = turns.add(*named("a", "b"))
    turns.pool.pin("c", "c", 10)
    turns.turn()
    assert [seq for seq, _ in turns.failed] == [both] and "2 adapters" in str(turns.failed[0][1])


def test_an_adapter_larger_than_its_file_says_waits_for_room():
    turns = Turns(most_bytes=30, most_held=9)
    turns.loads.sizes["a"] = 25
    turns.add(*named("b"))
    turns.turn()
    turns.load_all()
    turns.turn()
    large = turns.add(*named("a"))
    for _ in range(5):
        turns.turn()
        turns.load_all()
    assert large in turns.waiting and turns.pool.resident_bytes <= 30
    turns.end(turns.running[0])
    for _ in range(3):
        turns.turn()
        turns.load_all()
    assert large in turns.running
    turns.loads.sizes["huge"] = 31
    turns.add(*named("huge"))
    turns.end(large)
    for _ in range(3):
        turns.turn()
        turns.load_all()
    assert "31 bytes" in str(turns.failed[0][1])
    with pytest.raises(InvalidRequest, match="31 bytes"):
        turns.add(*named("huge"))


def test_the_size_in_memory_is_learnt_once():
    """An adapter that has left is loaded again only when there is room for what it takes."""
    turns = Turns(most_bytes=30, most_held=9)
    turns.loads.sizes["a"] = 25

    def use(name: str) -> None:
        seq = turns.add(*named(name))
        for _ in range(3):
            turns.turn()
            turns.load_all()
        assert seq in turns.running

    use("a")
    turns.end(turns.running[0])
    use("b")
    assert turns.pool.resident_bytes == 10, "a has left"
    turns.add(*named("a"))
    for _ in range(4):
        turns.turn()
        turns.load_all()
    assert turns.loads.begun == ["a", "b"]
    turns.end(turns.running[0])
    for _ in range(3):
        turns.turn()
        turns.load_all()
    assert turns.loads.begun == ["a", "b", "a"] and turns.running


def test_few_sizes_are_remembered(monkeypatch):
    monkeypatch.setattr("kvasir.sched.adapters.MOST_SIZES", 3)
    turns = Turns()
    for name in "abcde":
        seq = turns.add(*named(name))
        turns.turn()
        turns.load_all()
        turns.turn()
        turns.end(seq)
    assert [*turns.pool._sizes] == ["c", "d", "e"]


def test_changes_of_a_failed_step_are_made_again():
    turns = Turns()
    seq = turns.add(*named("a"))
    turns.turn()
    turns.load_all()
    turns.turn()
    changes = tuple(turns.installed.items())
    turns.pool.stop(seq)
    turns.running.remove(seq)
    turns.waiting.append(seq)
    turns.pool.lost(changes)
    turns.installed.clear()
    assert turns.turn() == [seq] and list(turns.installed.values()) == ["a"]


@examples(60)
@given(st.integers(0, 2**32))
def test_any_load_is_served_within_the_limits(seed):
    """Random requests, loads, ends, pauses and pins. Nothing exceeds a limit, a pinned adapter stays, and no request
    waits longer than those before it need."""
    chance = random.Random(seed)
    ids = chance.randint(2, 5)
    limits = {"ids": ids, "most_held": chance.randint(ids, 7), "most_bytes": chance.choice([40, 60, 1000])}
    turns = Turns(rows=chance.randint(1, 8), **limits)
    names = [f"a{i}" for i in range(chance.randint(1, 12))]
    sizes = {name: chance.choice([5, 10, 20]) for name in names}
    turns.loads.sizes |= sizes
    pinned: set[str] = set()
    paused: list[Any] = []

    def some() -> tuple[Adapter, ...]:
        chosen = chance.sample(names, min(len(names), chance.choice([0, 1, 1, 1, 2])))
        return tuple(named(name, nbytes=sizes[name])[0] for name in chosen)

    for step in range(90 + 90 * 12):  # a sequence runs for 6 turns, its adapters load within 6
        arriving = step < 90
        if arriving and chance.random() < 0.7:
            try:
                seq = turns.add(*some())
                seq.left = chance.randint(1, 6)
            except InvalidRequest:
                assert pinned or limits["most_bytes"] < 1000 or ids < 2
        if chance.random() < 0.05 and len(pinned) < 2:
            name = chance.choice(names)
            turns.pool.pin(name, name, sizes[name])
            pinned.add(name)
        if chance.random() < 0.05 and pinned:
            name = pinned.pop()
            turns.pool.drop(name)
        if arriving and chance.random() < 0.1 and turns.waiting:
            seq = chance.choice(turns.waiting)
            turns.end(seq)
            paused.append(seq)
        if paused and (not arriving or chance.random() < 0.3):
            seq = paused.pop()
            turns.pool.enter(seq)
            turns.waiting.append(seq)
        turns.turn()
        if not (arriving or turns.waiting or turns.running or paused):
            break
        assert sum(entry.loading is not None for entry in turns.pool._memory) <= MOST_LOADS
        for content in list(turns.loads.open):
            if chance.random() < 0.6:
                turns.loads.end(content)
        for seq in list(turns.running):
            seq.left -= 1
            if seq.left <= 0:
                turns.end(seq)
    assert not turns.waiting and not turns.running, "somebody waits forever"
    for _ in range(6):
        turns.turn()
        turns.load_all()
    held = {entry.content for entry in turns.pool._memory}
    assert pinned <= held
    assert all(isinstance(error, InvalidRequest) for _, error in turns.failed)
