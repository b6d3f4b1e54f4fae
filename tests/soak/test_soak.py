"""A short soak, and the proof that it can fail."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.soak.client import Tally
from tests.soak.clock import jump_clock
from tests.soak.server import Facts
from tests.soak.soak import soak
from tests.soak.work import Choice, ErrorEvent, streamed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_seconds_of_load_and_harm_leave_nothing_behind():
    tally = asyncio.run(soak(20.0, seed=1))
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.survived["of these, equal to the plain run"] > 20
    assert tally.survived["engine killed"] >= 1


async def test_clock_jumps_change_no_answer():
    tally = Tally()
    await jump_clock(tally, 1.5, random.Random(3))
    assert tally.injected["clock jumps"] > 3


async def _lines(*lines: str):
    for line in lines:
        yield line


async def test_a_stream_is_read_like_a_whole_answer():
    chunks = (
        '{"choices":[{"index":1,"text":"a","token_ids":[5]}]}',
        '{"choices":[{"index":1,"finish_reason":"stop"}]}',
    )
    found = await streamed(_lines(*(f"data: {chunk}" for chunk in chunks), "", "data: [DONE]"))
    assert found == {1: Choice("a", [5], {}, "stop")}


async def test_a_cut_stream_is_no_answer():
    with pytest.raises(AssertionError, match="end mark"):
        await streamed(_lines('data: {"choices":[]}'))
    with pytest.raises(ErrorEvent, match="deadline"):
        await streamed(_lines('data: {"error":{"code":"deadline_exceeded"}}'))


async def test_what_raises_is_counted_as_wrong():
    async def lost() -> None:
        raise AssertionError("another answer")

    tally = Tally()
    await tally.count("questions", lost())
    assert tally.injected["questions"] == 1 and not tally.survived["questions"]
    assert tally.wrong == ["questions: AssertionError: another answer"]


def test_one_descriptor_too_many_is_a_leak():
    base = Facts(fds=20, threads=8, bytes=100 << 20, children=2)
    assert base.excess(base) == []
    assert Facts(21, 8, 100 << 20, 2).excess(base) == ["fds: 21, at most 20"]
    assert Facts(20, 8, 400 << 20, 4).excess(base) == [
        f"bytes: {400 << 20}, at most {196 << 20}",
        "children: 4, at most 3",
    ]
