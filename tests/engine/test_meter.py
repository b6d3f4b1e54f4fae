"""Requests and tokens by adapter: each is counted, as few as a label may have, and none that is gone."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.meter import Meter
from kvasir.inputs import Adapter
from kvasir.statistics import MOST_ADAPTERS, OTHER_ADAPTERS, by_adapter
from kvasir.types import Request, SamplingParams


def asked(meter: Meter, *names: str) -> None:
    adapters = tuple(map(Adapter, names))
    with meter.watch(Request("r", (1, 2, 3), SamplingParams(max_tokens=1), adapters=adapters), None):
        pass


def test_only_the_first_adapters_have_numbers_of_their_own():
    meter = Meter()
    for turn in range(2):
        for i in range(MOST_ADAPTERS + 7):
            asked(meter, f"a{i}")
        own = {name: stats.requests for name, stats in meter.adapters.items()}
        assert own.pop(OTHER_ADAPTERS) == 7 * (turn + 1)
        assert own == {f"a{i}": turn + 1 for i in range(MOST_ADAPTERS)}
    asked(meter, "a1", "a200", "a201", "a1")
    assert (meter.adapters["a1"].requests, meter.adapters[OTHER_ADAPTERS].requests) == (3, 15)


def test_an_adapter_that_is_unloaded_has_no_numbers_and_begins_anew():
    meter = Meter()
    asked(meter, "x")
    with meter.watch(Request("r", (1,), SamplingParams(max_tokens=1), adapters=(Adapter("x"),)), None):
        assert (meter.adapters["x"].requests, meter.adapters["x"].open_requests) == (2, 1)
        meter.forget("x")
        assert not meter.adapters
        asked(meter, "x")
    assert (meter.adapters["x"].requests, meter.adapters["x"].open_requests) == (1, 0)
    meter.forget("never loaded")


@given(st.lists(st.integers(0, 300).map(str), max_size=900))
def test_names_are_counted_and_the_rarest_are_together(names):
    found, counts = by_adapter(names), Counter(names)
    assert sum(found.values()) == len(names) and len(found) <= MOST_ADAPTERS + 1
    rest = set(counts) - set(found)
    assert all(found[name] == counts[name] for name in found if name != OTHER_ADAPTERS)
    assert found.get(OTHER_ADAPTERS, 0) == sum(counts[name] for name in rest)
    assert not rest or max(counts[name] for name in rest) <= min(counts[n] for n in found if n != OTHER_ADAPTERS)
