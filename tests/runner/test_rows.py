"""Rows follow plans: joining, extending, sampling, failing, leaving."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.caches import PagedKV, Window
from kvasir.inputs import Inputs, Span
from kvasir.plan import (
    Adapted,
    CacheGroup,
    Capacity,
    Decodes,
    EncoderWork,
    Join,
    SamplingSpec,
    StepPlan,
    Work,
    pack_ids,
)
from kvasir.runner.rows import BROKEN, Rows

GROUPS = (CacheGroup(PagedKV(1, 4), (0,), 512), CacheGroup(Window(1, 4, window=20), (1,), 512))
CAPACITY = Capacity(4, 64, 100, 16, GROUPS, (8, 8), vocab_size=50)
CONTENT = sha256(b"image").digest()


@pytest.fixture
def rows() -> Rows:
    return Rows(CAPACITY)


def join(ids, row=0, prompt_len=None, **more) -> Join:
    spec = more.pop("spec", SamplingSpec())
    return Join(row, pack_ids(ids), len(ids) if prompt_len is None else prompt_len, spec, **more)


def known_ids(rows: Rows, row: int) -> list[int]:
    return rows[row].ids[: rows[row].known].tolist()


def test_a_sequence_joins_with_its_ids_and_leaves_nothing(rows):
    rows.apply(StepPlan(0, joined=(join([5, 6, 7], row=2, adapters=(Adapted(0),)),)))
    assert known_ids(rows, 2) == [5, 6, 7] and rows.used == 1 and rows.known.tolist() == [0, 0, 3, 0]
    left = rows[2]
    rows.apply(StepPlan(1, left=(2,)))
    assert rows.used == 0 and not rows.known.any() and not rows.has(2, left)
    with pytest.raises(AssertionError):
        rows[2]


def test_an_occupied_row_accepts_no_other_sequence(rows):
    rows.apply(StepPlan(0, joined=(join([5]),)))
    with pytest.raises(AssertionError):
        rows.apply(StepPlan(1, joined=(join([6]),)))
    rows.apply(StepPlan(1, left=(0,), joined=(join([6]),)))
    assert known_ids(rows, 0) == [6]


def test_the_next_sequence_of_a_row_starts_with_empty_tables(rows):
    blocks = ((0, (3, 4)), (0, (5,)))
    rows.apply(StepPlan(0, joined=(join([1] * 20),), work=(Work(0, 0, 20, blocks),)))
    assert [table[:3].tolist() for table in rows[0].tables] == [[3, 4, 0], [5, 0, 0]]
    assert [table[0, :2].tolist() for table in rows.arrays.tables] == [[3, 4], [5, 0]]
    rows.apply(StepPlan(1, left=(0,), joined=(join([2]),)))
    assert not any(table.any() for table in rows.arrays.tables) and rows[0].filled == [0, 0]


def test_a_table_is_extended_without_gaps(rows):
    rows.apply(StepPlan(0, joined=(join([1] * 40),), work=(Work(0, 0, 16, ((0, (3,)),)),)))
    rows.apply(StepPlan(1, work=(Work(0, 16, 16, ((1, (4,)),)),)))
    assert rows[0].tables[0][:2].tolist() == [3, 4]
    with pytest.raises(AssertionError):
        rows.apply(StepPlan(2, work=(Work(0, 32, 8, ((3, (5,)),)),)))


@pytest.mark.parametrize("bad", [-1, 50, 1 << 30])
@pytest.mark.parametrize("where", ["joined", "appended"])
def test_ids_outside_the_vocabulary_are_refused_and_change_no_row(rows, bad, where):
    rows.apply(StepPlan(0, joined=(join([1, 2], row=0), join([3], row=1))))
    plan = {
        "joined": StepPlan(
            1, left=(1,), joined=(join([7, bad], row=2),), work=(Work(0, 0, 2, appended=pack_ids([4])),)
        ),
        "appended": StepPlan(1, left=(1,), joined=(join([7], row=2),), work=(Work(0, 0, 3, appended=pack_ids([bad])),)),
    }[where]
    with pytest.raises(ValueError, match=rf"{bad}.*50"):
        rows.apply(plan)
    assert rows.known.tolist() == [2, 0, 0, 0], "rows are only freed"


def test_appended_ids_become_known(rows):
    rows.apply(StepPlan(0, joined=(join([1, 2]),), work=(Work(0, 0, 4, appended=pack_ids([8, 9])),)))
    assert known_ids(rows, 0) == [1, 2, 8, 9]


@pytest.mark.parametrize("sampled", [(7,), (8, 7), (8, 9, 7)])
def test_sampled_ids_replace_the_draft(rows, sampled):
    work = Work(0, 0, 4, appended=pack_ids([8, 9]), drafted=2, sample=True)
    rows.apply(StepPlan(0, joined=(join([1, 2]),), work=(work,)))
    rows[0].take(work, sampled, b"carry")
    assert known_ids(rows, 0) == [1, 2, *sampled] and rows[0].carry == b"carry"


@given(st.integers(1, 8), st.integers(0, 8), st.data())
def test_read_returns_each_next_id_with_its_entries(prompt_len, sampled, data):
    """As many top entries as the spec wants for prompt ids, or for sampled ids."""
    ids = [10 + i for i in range(prompt_len + sampled)]
    rows = Rows(CAPACITY)
    rows.apply(
        StepPlan(0, joined=(join(ids, prompt_len=prompt_len, spec=SamplingSpec(prompt_logprobs=2, logprobs=5)),))
    )
    end = data.draw(st.integers(0, len(ids) - 1))
    first = data.draw(st.integers(0, end))
    found, best = rows[0].read(first, end)
    assert found == ids[first + 1 : end + 1]
    assert best == [2 if position + 1 < prompt_len else 5 for position in range(first, end)]


def test_no_id_is_read_after_the_last_known_one(rows):
    rows.apply(StepPlan(0, joined=(join([1, 2, 3]),)))
    with pytest.raises(AssertionError):
        rows[0].read(0, 3)


def test_columns_take_one_id_for_each_row(rows):
    rows.apply(StepPlan(0, joined=tuple(join([i] * (i + 1), row=i) for i in range(3))))
    decodes = Decodes(pack_ids([2, 0]), pack_ids([2, 0]), blocks=((0, 1, 0, 6),))
    rows.apply(StepPlan(1, decodes=decodes))
    assert rows[2].tables[1][0] == 6 and not rows[0].tables[1].any()
    rows.take(np.array([2, 0], np.int32), np.array([40, 41], np.int32))
    assert [known_ids(rows, row) for row in range(3)] == [[0, 41], [1, 1], [2, 2, 2, 40]]


def test_a_column_computes_the_last_known_id(rows):
    rows.apply(StepPlan(0, joined=(join([1, 2, 3]),)))
    with pytest.raises(AssertionError):
        rows.apply(StepPlan(1, decodes=Decodes(pack_ids([0]), pack_ids([1]))))


def test_a_broken_row_is_not_sound_until_another_sequence_has_it(rows):
    rows.apply(StepPlan(0, joined=(join([1], row=0), join([2], row=1))))
    rows.break_(rows[0])
    assert rows[0].fault == BROKEN
    assert not rows.sound(np.array([0, 1], np.int32)) and rows.sound(np.array([1], np.int32))
    rows.apply(StepPlan(1, left=(0,), joined=(join([3], row=0),)))
    assert rows.sound(np.array([0, 1], np.int32)) and not rows[0].fault


def test_a_late_failure_does_not_break_the_next_sequence_of_the_row(rows):
    rows.apply(StepPlan(0, joined=(join([1]),)))
    old = rows[0]
    rows.apply(StepPlan(1, left=(0,), joined=(join([2]),)))
    rows.break_(old)
    assert old.fault == BROKEN and not rows[0].fault and rows.sound(np.array([0], np.int32))


@pytest.mark.parametrize(
    ("needs", "change", "named"),
    [
        ("spans", {"inputs": Inputs((Span(0, 1, CONTENT),))}, "in the place of tokens"),
        ("bias", {"inputs": Inputs(bias=bytes(8))}, "bias"),
        ("adapters", {"adapters": (Adapted(0, 0.5),)}, "scale"),
        ("drafted", {"appended": pack_ids([3]), "drafted": 1}, "Work.drafted"),
        ("pending", {"pending": (9,)}, "Work.pending"),
        ("propose", {"propose": 3}, "Work.propose"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_features_that_the_executor_lacks_are_named(needs, change, named):
    joins, works = (
        {n: v for n, v in change.items() if n in names} for names in (("inputs", "adapters"), Work.__slots__)
    )
    plan = StepPlan(0, joined=(join([1, 2], **joins),), work=(Work(0, 0, 2 + ("drafted" in works), **works),))
    for computes, fault in ((frozenset(), True), (frozenset((needs,)), False)):
        rows = Rows(CAPACITY, computes)
        rows.apply(plan)
        assert bool(rows[0].fault) == fault and (not fault or named in rows[0].fault)


def test_an_adapter_is_refused_until_it_is_loaded(rows):
    rows.apply(StepPlan(0, joined=(join([1], adapters=(Adapted(7),)),)))
    assert "7" in rows[0].fault
    rows.adapters.add(7)
    rows.apply(StepPlan(1, left=(0,), joined=(join([1], adapters=(Adapted(7),)),)))
    assert not rows[0].fault and rows[0].adapter == 7


def test_encoder_jobs_need_an_encoder(rows):
    plan = StepPlan(0, joined=(join([1]),), encodes=(EncoderWork(CONTENT, 2, b"image"),))
    with pytest.raises(ValueError, match="encodes"):
        rows.apply(plan)
    assert rows.used == 0
    able = Rows(CAPACITY, frozenset(("encodes",)))
    able.apply(plan)
    assert able.used == 1
