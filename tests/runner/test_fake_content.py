"""The numbers of the fake runner: each input changes the numbers of the positions that it applies to."""

from __future__ import annotations

from functools import partial
from hashlib import sha256

import numpy as np

from kvasir.inputs import NONE, Adapter, Inputs, Span
from kvasir.plan import pack_ids
from kvasir.runner.fake_content import PLAIN, FakeContent, fake_mixed

IDS = np.arange(1, 9)
x, y = partial(Adapter, "x", content="x"), partial(Adapter, "y", content="y")
IMAGE, CLIP = sha256(b"image").digest(), sha256(b"clip").digest()


def numbers(inputs: Inputs = NONE, adapters=()) -> list[int]:
    return FakeContent(inputs, adapters, len(IDS)).numbers(IDS).tolist()


def changed(inputs: Inputs = NONE, adapters=()) -> list[int]:
    return [place for place, (a, b) in enumerate(zip(numbers(inputs, adapters), IDS, strict=True)) if a != b]


def test_without_inputs_the_numbers_are_the_ids():
    content = FakeContent(NONE, (), len(IDS))
    assert numbers() == PLAIN.numbers(IDS).tolist() == IDS.tolist()
    assert (content.scope, content.ahead) == (PLAIN.scope, PLAIN.ahead) == (0, 0)
    assert not content.reads(0, 8) and not content.inside(3)


def test_a_span_replaces_its_ids_or_is_added_to_them():
    replaced, added = (numbers(Inputs((Span(2, 3, IMAGE, added=added),))) for added in (False, True))
    assert changed(Inputs((Span(2, 3, IMAGE),))) == [2, 3, 4]
    assert [b - a for a, b in zip(replaced, added, strict=True)] == [0, 0, *IDS[2:5], 0, 0, 0]


def test_numbers_of_a_span_depend_on_its_content_and_place_in_it():
    first, second = (numbers(Inputs((Span(2, 2, IMAGE, first=f),))) for f in (0, 1))
    assert first[3] == second[2] and first[2] != second[2]
    assert numbers(Inputs((Span(2, 2, CLIP),)))[2] != first[2]


def test_an_adapter_changes_everything_from_its_start_on():
    assert changed(adapters=(x(start=5),)) == [5, 6, 7]
    assert numbers(adapters=(x(start=5),)) != numbers(adapters=(y(start=5),))
    assert numbers(adapters=(x(scale=0.5),)) != numbers(adapters=(x(),))


def test_inputs_of_the_whole_sequence_are_its_scope():
    given = [(Inputs(bias=bytes(4)), ()), (Inputs(encoded=IMAGE), ()), (NONE, (x(),)), (NONE, (y(),))]
    scopes = {FakeContent(inputs, adapters, 8).scope for inputs, adapters in [(NONE, ()), *given]}
    assert len(scopes) == 5
    assert FakeContent(NONE, (x(start=3),), 8).scope == 0, "it begins later"


def test_explicit_positions_change_the_numbers():
    given = Inputs(positions=pack_ids([0, 1, 5, 6, 7, 8, 9, 10]))
    assert changed(given) == [2] and FakeContent(given, (), 8).ahead == 3


def test_contents_are_read_by_the_steps_that_compute_their_spans():
    content = FakeContent(Inputs((Span(1, 2, IMAGE), Span(5, 2, CLIP)), encoded=b"e"), (), 8)
    assert content.reads(0, 2) == [IMAGE, b"e"], "an encoder's output is read by the first step"
    assert content.reads(2, 6) == [IMAGE, CLIP] and content.reads(3, 5) == [] and content.reads(7, 8) == []


def test_a_span_that_attends_both_ways_is_cut_inside_only():
    content = FakeContent(Inputs((Span(2, 3, IMAGE, both_ways=True), Span(6, 2, CLIP))), (), 8)
    assert [content.inside(place) for place in range(9)] == [0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_mixed_values_differ_by_order_and_type():
    assert len({fake_mixed(1, 2), fake_mixed(2, 1), fake_mixed("1", 2), fake_mixed((1, 2))}) == 4
