"""The table of statistics is complete: every field is a row, and every row is counted, exported and explained."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir import server_statistics, statistics
from kvasir.batch_statistics import BatchStats
from kvasir.engine import core
from kvasir.metrics import STATISTIC, Each, Histogram, counter, each, gauge, histogram, recent, rows, samples
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.serve.page.tiles import tiles
from kvasir.statistics import DASHBOARD, EngineStats, FrontStats, HttpStats, counted, table
from scripts import make_metrics_docs

TABLE = list(table())
EXPORTED = [row for row in TABLE if row.is_exported]


def test_every_field_of_every_holder_is_a_row():
    holders = [HttpStats, BatchStats, FrontStats, EngineStats]
    for holder in holders:
        for of in fields(holder):
            declared = of.metadata.get(STATISTIC)
            assert declared is not None, f"{holder.__name__}.{of.name}: declare it with counter(), gauge() ..."
            if isinstance(declared, Each):
                holders.append(declared.holder)
    kinds = (*vars(statistics).values(), *vars(server_statistics).values())
    named = {kind for kind in kinds if isinstance(kind, type) and kind.__name__.endswith("Stats")}
    assert named == set(holders), "every holder is in the table"


def test_every_statistic_has_a_name_and_a_help_text():
    first = {}
    for row in EXPORTED:
        known = first.setdefault(row.statistic.name, row)
        assert known.statistic.help.endswith("."), row
        assert (known.statistic.kind, known.labels) == (row.statistic.kind, row.labels), row
    for row in TABLE:
        if not row.statistic.name:
            assert row.statistic.help, f"{row.field}: why is it not exported?"
            assert not row.statistic.charts, f"{row.field} is not exported, so no chart can show it"


def test_charts_and_tiles_refer_to_existing_statistics():
    names, engine = {row.statistic.name for row in EXPORTED}, {of.name for of in fields(EngineStats)}
    for row in TABLE:
        for chart in row.statistic.charts:
            assert chart.row in DASHBOARD and (not chart.per or chart.per in names)
            assert {*(chart.by or ())} <= {*row.labels, "instance"}, row
    for title, numbers in tiles().items():
        assert [bool(number["text"]) for number in numbers] == sorted(bool(number["text"]) for number in numbers)
        assert not numbers[0]["text"], f"{title} begins with its value"
        assert all(number["of"] in engine | {""} for number in numbers)


def test_the_metrics_page_is_up_to_date():
    assert make_metrics_docs.PAGE.read_text() == make_metrics_docs.page(), "run python scripts/make_metrics_docs.py"


def test_the_engine_counts_every_engine_statistic(monkeypatch):
    runner = FakeRunner()
    engine = core.EngineCore(runner, Scheduler(runner.capacity))
    monkeypatch.setattr(core, "EngineStats", lambda **values: values)
    not_counted = {of.name for of in fields(EngineStats)} - set(engine.stats())
    added = {"adapters_registered", "event_batches", "event_batches_dropped", "replicas", "pid"}
    assert not_counted == added, "the engine's handle adds these"


def test_a_row_is_counted_under_its_name_and_the_first_owner_wins():
    class Owner:
        def __init__(self, **counts: int):
            vars(self).update(counts)

    found = counted(Owner(steps=1, running=7), Owner(steps=2, finished=3, other=4))
    assert found == {"steps": 1, "finished": 3}, "gauges and other attributes are not counters"


# -- how rows are read -----------------------------------------------------------------------------------------------


@dataclass
class Inner:
    hits: int = counter("hits", "Hits.")
    times: Histogram = histogram("times", "Times.")


@dataclass
class Outer:
    plain: int = gauge("plain", "Plain.")
    part: int = gauge("part_ratio", "Part.", share_of="plain")
    words: dict = counter("words", "Words.", start=dict, labels=("word",))
    pairs: dict = counter("pairs", "Pairs.", start=dict, labels=("a", "b"))
    others: dict = counter("words_of", "", start=dict, labels=("kind", "word"), above=("none",))
    inner: dict = each("kind", Inner)
    hidden: int = counter("", "not exported")
    last: deque = recent("last", "Last.", start=deque)


WORDS = st.text("abc", max_size=2)


@given(
    st.integers(0, 9), st.dictionaries(WORDS, st.integers()), st.dictionaries(st.tuples(WORDS, WORDS), st.integers())
)
def test_samples_are_the_values_with_their_labels(plain, words, pairs):
    inner = {word: Inner(count) for word, count in words.items()}
    value = Outer(plain, 3, words, pairs, words, inner, 5, deque([1]))
    found = [(name, tuple(labels), number) for name, labels, number in samples(Outer, value, ("m",))]
    wanted = [("plain", ("m",), plain), ("part_ratio", ("m",), 3 / plain if plain else 0.0)]
    wanted += [("words", ("m", word), count) for word, count in words.items()]
    wanted += [("pairs", ("m", *pair), count) for pair, count in pairs.items()]
    wanted += [("words_of", ("m", "none", word), count) for word, count in words.items()]
    for word, one in inner.items():
        wanted += [("hits", ("m", word), one.hits), ("times", ("m", word), one.times)]
    assert sorted(found, key=repr) == sorted(wanted, key=repr)
    names = {row.statistic.name: row.labels for row in rows(Outer, ("model_name",)) if row.is_exported}
    assert all(len(names[name]) == len(labels) for name, labels, _ in found)
    assert "last" not in names and "" not in names


def test_a_field_that_is_no_row_is_found():
    @dataclass
    class Careless:
        forgotten: int = 0

    with pytest.raises(KeyError):
        list(rows(Careless))
