"""Random inputs: few contents in few places, so that many have something in common and differ in the rest."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256

from kvasir.inputs import Adapter, Inputs, Source, Span
from kvasir.plan import pack_ids
from tests.sched.drive import ADAPTERS, adapter

SOURCES = {sha256(data).digest(): Source(sha256(data).digest(), 14, data) for data in (b"cat", b"dog", b"tune")}
CONTENTS = list(SOURCES)
PLACES = ((2, 5), (9, 1), (12, 9), (30, 14))  # (start, length)


def random_span(draw: random.Random, start: int, length: int, most: int) -> Span:
    """most: tokens that a step computes of a sequence."""
    return Span(
        start,
        length,
        draw.choice(CONTENTS),
        draw.choice([0, 14 - length]),
        added=draw.random() < 0.3,
        layers=draw.choice([(), (), (0, 2)]),
        both_ways=length <= most and draw.random() < 0.3,
    )


def sources_of(inputs: Inputs) -> tuple[Source, ...]:
    """Of all its contents."""
    named = {span.content for span in inputs.spans} | ({inputs.encoded} - {b""})
    return tuple(source for content, source in SOURCES.items() if content in named)


def random_positions(draw: random.Random, length: int) -> tuple[bytes, int]:
    """As a picture has them: three axes that go their own ways for some tokens, then all continue from the greatest."""
    axes, first, width = draw.choice([1, 3]), draw.choice([2, 12]), draw.choice([3, 5])
    places, next_one = [], 0
    for i in range(length):
        if first <= i < first + 6:
            at = (first, first + (i - first) // width, first + (i - first) % width)
        else:
            at = (next_one,) * 3
        places += at[-axes:]
        next_one = max(next_one, *(x + 1 for x in at[-axes:]))
    return pack_ids(places), axes


def random_inputs(draw: random.Random, length: int, most: int = 2**31) -> Inputs:
    """For a prompt of `length` tokens."""
    places = [(start, size) for start, size in PLACES if start + size <= length and draw.random() < 0.5]
    found = Inputs(tuple(random_span(draw, start, size, most) for start, size in places))
    if draw.random() < 0.3:
        positions, axes = random_positions(draw, length)
        found = replace(found, positions=positions, axes=axes)
    return replace(
        found,
        bias=bytes(4) + b"\0\0\x80\xbf" if draw.random() < 0.1 else b"",
        encoded=draw.choice(CONTENTS) if draw.random() < 0.1 else b"",
        second=draw.choice([1, length // 2]) if draw.random() < 0.1 and length > 1 else 0,
    )


def random_adapters(draw: random.Random, length: int) -> tuple[Adapter, ...]:
    """Some begin with the prompt, some inside it, some in the answer."""
    starts = [0, 0, 7, 16, length + 2]
    return tuple(
        adapter(draw.choice(ADAPTERS), draw.choice([1.0, 0.5]), draw.choice(starts)) for _ in range(draw.choice([1, 2]))
    )
