"""Sequences of equal ids that are computed from different things: what they share, and what they never do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.caches import Cross, PagedKV, State, Window
from kvasir.engine.core import EngineCore
from kvasir.errors import InvalidRequest
from kvasir.inputs import FEATURES, NONE, Adapter, Inputs, Span
from kvasir.plan import pack_ids
from kvasir.runner.fake import FakeRunner
from kvasir.sched import content
from kvasir.sched.scheduler import Scheduler
from kvasir.types import Request, SamplingParams
from tests.examples import examples
from tests.oracle import plain, same, together
from tests.sched.drive import Drive, adapter, adapter_pool, by_hand
from tests.sched.inputs import CONTENTS, random_adapters, random_inputs, sources_of

SIZE, PROMPT = 8, tuple(range(40))
CAT, DOG, _ = CONTENTS


def make(**options) -> Drive:
    options = {"num_blocks": 100, "block_size": SIZE, **options}
    runner = FakeRunner(**options)
    return Drive(Scheduler(runner.capacity, adapters=adapter_pool()), runner)


def ask(drive: Drive, inputs: Inputs = NONE, adapters: tuple[Adapter, ...] = (), prompt=PROMPT) -> int:
    """Tokens found in the cache; the answer is the right one."""
    request = Request(f"r{len(drive.plans)}", prompt, SamplingParams(max_tokens=6, seed=0))
    request = replace(request, adapters=adapters, inputs=inputs, sources=sources_of(inputs))
    before = drive.scheduler.cached_tokens
    drive.scheduler.add(request)
    drive.drain()
    assert drive.tokens[request.id, 0] == by_hand(request, 256, 512)[0]
    return drive.scheduler.cached_tokens - before


def image(what: bytes = CAT, start: int = 16, length: int = 10, **more) -> Inputs:
    return Inputs((Span(start, length, what, **more),))


def turned(at: int) -> Inputs:
    """The positions from `at` on are greater by 5."""
    return Inputs(positions=pack_ids([i + 5 * (i >= at) for i in range(len(PROMPT))]))


WHOLE = len(PROMPT) - 1  # the last one is always computed


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ({"inputs": image()}, {"inputs": image()}, WHOLE),
        ({"inputs": image()}, {"inputs": image(DOG)}, 16),
        ({"inputs": image()}, {}, 16),
        ({"inputs": image()}, {"inputs": image(added=True)}, 16),
        ({"inputs": image()}, {"inputs": image(layers=(0, 3))}, 16),
        ({"inputs": image()}, {"inputs": image(both_ways=True)}, 16),
        ({"inputs": image()}, {"inputs": image(first=2)}, 16),
        ({"inputs": image()}, {"inputs": image(length=11)}, 16),
        ({"inputs": image(start=15)}, {"inputs": image(start=17)}, 15),
        ({"inputs": image(DOG, start=2, length=2)}, {"inputs": image(DOG, start=2, length=2)}, WHOLE),
        ({"inputs": turned(20)}, {}, 20),
        ({"inputs": turned(20)}, {"inputs": turned(20)}, WHOLE),
        ({"inputs": turned(20)}, {"inputs": turned(24)}, 20),
        ({"inputs": Inputs(positions=pack_ids(range(40)))}, {}, WHOLE),
        ({"inputs": Inputs(positions=pack_ids([i for i in range(40) for _ in "xyz"]), axes=3)}, {}, WHOLE),
        ({"inputs": Inputs(bias=bytes(4))}, {}, 0),
        ({"inputs": Inputs(bias=bytes(4))}, {"inputs": Inputs(bias=bytes(4))}, WHOLE),
        ({"inputs": Inputs(encoded=CAT)}, {"inputs": Inputs(encoded=DOG)}, 0),
        ({"adapters": (adapter("x"),)}, {}, 0),
        ({"adapters": (adapter("x"),)}, {"adapters": (adapter("x"),)}, WHOLE),
        ({"adapters": (adapter("x"),)}, {"adapters": (adapter("x", 0.5),)}, 0),
        ({"adapters": (adapter("x"),)}, {"adapters": (adapter("y"),)}, 0),
        ({"adapters": (adapter("x", start=20),)}, {}, 20),
        ({"adapters": (adapter("x", start=20),)}, {"adapters": (adapter("x", start=20),)}, WHOLE),
        ({"adapters": (adapter("x", start=20),)}, {"adapters": (adapter("x", start=30),)}, 20),
        ({"adapters": (adapter("x", start=20),)}, {"adapters": (adapter("x", start=20), adapter("y", start=30))}, 30),
        ({"adapters": (adapter("x"), adapter("y", start=9))}, {"adapters": (adapter("x"),)}, 9),
        ({"adapters": (adapter("x"), adapter("y"))}, {"adapters": (adapter("y"), adapter("x"))}, 0),
        ({"adapters": (adapter("x", start=44),)}, {}, WHOLE),
    ],
)  # fmt: skip
def test_prefixes_are_shared_where_the_inputs_are_equal(first, second, shared):
    for one, other in ((first, second), (second, first)):
        drive = make()
        assert [ask(drive, **one), ask(drive, **other)] == [0, shared]


def test_a_bidirectional_span_is_computed_whole_or_not_at_all():
    drive = make()
    assert ask(drive, image(both_ways=True)) == 0
    assert ask(drive, image(both_ways=True), prompt=PROMPT[:26]) == 16
    assert ask(drive, image(both_ways=True), prompt=PROMPT[:27]) == 26


def test_a_key_without_the_hash_is_noticed(monkeypatch):
    monkeypatch.setattr(content.SequenceContent, "key", lambda self, tokens: tokens.tobytes())
    drive = make()
    ask(drive, image())
    with pytest.raises(AssertionError, match="never wrote"):
        ask(drive, image(DOG))


def test_numbers_of_dropped_contents_are_not_reused():
    numbers = content.MarkIds(most=2)
    first = numbers.of(1, b"a")
    assert numbers.of(1, b"a") == first and numbers.of(2, b"a") < first
    assert numbers.of(1, b"b") not in (first, numbers.of(1, b"a")), "a number is given away again"


KINDS = ((PagedKV(),), (Window(window=12),), (PagedKV(), State()), (Cross(length=6), PagedKV(), Window(window=20)))


@examples(12)
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.booleans(), st.integers(16, 40))
def test_together_equals_alone(seed, kinds, overlaps, step):
    """Chunks, hits, preemptions and tiny pools, over prompts that differ in what their ids do not tell."""
    draw = random.Random(seed)

    def core(**options) -> EngineCore:
        fake = FakeRunner(kinds=kinds, block_size=SIZE, max_model_len=96, overlaps=overlaps, **options)
        return EngineCore(fake, Scheduler(fake.capacity, max_chunk=14, adapters=adapter_pool()))

    requests = [
        Request(
            f"r{i}",
            PROMPT[: draw.choice([20, 40])] + tuple(draw.randrange(256) for _ in range(draw.randrange(9))),
            SamplingParams(max_tokens=draw.randrange(1, 12), n=draw.choice([1, 2]), seed=draw.randrange(9)),
        )
        for i in range(8)
    ]
    requests = [
        replace(
            r,
            inputs=(given := random_inputs(draw, len(r.prompt_ids), 14)),
            sources=sources_of(given),
            adapters=random_adapters(draw, len(r.prompt_ids)) if draw.random() < 0.3 else (),
        )
        for r in requests
    ]
    expected = plain(core(num_blocks=200), requests)
    crowded = core(num_blocks=16, max_rows=3, max_tokens_per_step=step)
    same(expected, together(crowded, requests, seed=seed, preempt=0.1))


@pytest.mark.parametrize(
    ("inputs", "adapters", "named"),
    [
        (image(b"short"), (), "hash"),
        (image(start=35), (), "prompt"),
        (image(length=0), (), "prompt"),
        (Inputs((Span(9, 3, CAT), Span(5, 2, CAT))), (), "ascending"),
        (image(layers=(3, 1)), (), "layers"),
        (Inputs(encoded=b"short"), (), "hash"),
        (Inputs(positions=pack_ids([1, 2])), (), "expected 40"),
        (Inputs(positions=b"123"), (), "expected 40"),
        (Inputs(positions=pack_ids([-1] * 40)), (), "negative"),
        (Inputs(positions=pack_ids([0] * 80), axes=2), (), "1 or 3"),
        (Inputs(bias=b"123"), (), "bias"),
        (Inputs(bias=b"\0\0\xc0\x7f"), (), "bias"),
        (Inputs(), (adapter("x", float("nan")),), "scale"),
        (Inputs(), (adapter("x", 1e39),), "scale"),
        (Inputs(), (adapter("x"),) * 9, "9 adapters for one request"),
        (Inputs(), (adapter("x", 1.0, -1),), "position"),
        (Inputs(), (Adapter("z"),), "adapter 'z' is not loaded"),
        (image(length=14, both_ways=True), (), "12"),
    ],
)
def test_invalid_inputs_are_refused_by_name(inputs, adapters, named):
    drive = make(max_tokens_per_step=12)
    with pytest.raises(InvalidRequest, match=named):
        ask(drive, inputs, adapters)


@pytest.mark.parametrize("feature", FEATURES)
def test_features_that_the_executor_lacks_are_refused_by_name(feature):
    asks = {
        "spans": (image(), ()),
        "added": (image(added=True), ()),
        "layers": (image(layers=(1,)), ()),
        "both_ways": (image(both_ways=True), ()),
        "encoded": (Inputs(encoded=CAT), ()),
        "positions": (turned(20), ()),
        "axes": (Inputs(positions=pack_ids([0] * 120), axes=3), ()),
        "bias": (Inputs(bias=bytes(4)), ()),
        "second": (Inputs(second=3), ()),
        "adapters": (Inputs(), (adapter("x", 0.5),)),
    }
    runner = FakeRunner()
    without = replace(runner.capacity, computes=tuple(name for name in FEATURES if name != feature))
    with pytest.raises(InvalidRequest, match=FEATURES[feature]):
        ask(Drive(Scheduler(without, adapters=adapter_pool()), runner), *asks[feature])


def test_a_span_without_room_gets_room_in_the_next_step():
    """Six answers leave ten tokens of each step; the span has fourteen."""
    drive = make(max_tokens_per_step=16, max_rows=8)
    for i in range(6):
        drive.scheduler.add(Request(f"long {i}", (i,) * 2, SamplingParams(max_tokens=100, seed=0)))
    for _ in range(4):
        drive.step()
    given = image(start=4, length=14, both_ways=True)
    request = Request("image", PROMPT, SamplingParams(max_tokens=2, seed=0), inputs=given, sources=sources_of(given))
    drive.scheduler.add(request)
    for _ in range(12):
        drive.step()
    assert drive.tokens["image", 0] == by_hand(request, 256, 512)[0]
    assert len(drive.tokens["long 0", 0]) >= 10, "the others hardly wait"
    drive.drain()
