"""A stream that breaks continues at another server, wherever it broke: what both sent is the unbroken stream."""

from __future__ import annotations

import random
from contextlib import aclosing

import httpx
import pytest

from kvasir.engine.front import Front
from kvasir.serve.conversation.event_ids import _join
from kvasir.types import Request
from tests.serve.dialects.table import DEADLINE, LENGTH, ROWS, SEED, STOP, TEMPERATURE, Row
from tests.serve.running import client, make_front

ASKED = {"X-Kvasir-Event-Ids": "on"}
CONTINUED = [row for row in ROWS if row.path != "/v1/responses"]  # which has a way of its own
TEXT = "a prompt with é and 😀 in it, "


@pytest.fixture(params=CONTINUED, ids=[row.path for row in CONTINUED])
def row(request):
    return request.param


def uneven(seed: int, **runner) -> Front:
    """A front whose engine gives several tokens at once, now and then."""
    front, rng = make_front(**runner), random.Random(seed)
    submit = front.engine.submit

    async def joined(request: Request):
        held = None
        async with aclosing(submit(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                held = delta if held is None else _join(held, delta)
                if delta.finish_reason or rng.random() < 0.5:
                    yield held
                    held = None

    front.engine.submit = joined  # type: ignore[method-assign]
    return front


def events_of(text: str) -> list[str]:
    if "\n\n" not in text:
        return text.splitlines(keepends=True)
    return [part + "\n\n" for part in text.split("\n\n") if part and not part.startswith(":")]


def id_of(event: str) -> str:
    if event.startswith("id: "):
        return event.removeprefix("id: ").partition("\n")[0]
    return event.rpartition('"event_id":"')[2].partition('"')[0]


def plain(events: list[str]) -> str:
    """The stream without the lines of ids."""
    return "".join(e.partition("\n")[2] if e.startswith("id: ") else e for e in events)


async def streamed(http: httpx.AsyncClient, row: Row, body: dict, last: str = "") -> list[str]:
    headers = {"Last-Event-ID": last} if last else ASKED
    response = await http.post(row.path_of(True), json=body, headers=headers)
    assert response.status_code == 200, response.text
    return events_of(response.text)


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "common",
    [
        {LENGTH: 24, TEMPERATURE: 1.0},
        {LENGTH: 30, TEMPERATURE: 0.7, SEED: 5, DEADLINE: 60},
        {LENGTH: 30, STOP: ["zz", "in i"]},
    ],
    ids=["drawn seed", "own seed", "stop"],
)
async def test_both_parts_are_the_whole_stream_wherever_it_broke(row, common):
    async with client(front=uneven(1)) as one, client(front=uneven(2)) as other:
        body = row.request(TEXT, True, **common, **(row.greedy if STOP in common else {}))
        whole = await streamed(one, row, body)
        ids = [id_of(event) for event in whole]
        assert len(set(ids)) == len(ids) > 4 and all(ids), ids
        wanted = row.read(plain(whole), True)
        for count in (*range(1, len(whole), 3), len(whole) - 1):
            rest = await streamed(other, row, body, ids[count - 1])
            assert row.read(plain(whole[:count] + rest), True) == wanted, count
        assert await streamed(other, row, body, ids[-1]) == []
        assert other.app.state.http_meter.continuations == {"continued": len(range(1, len(whole), 3)) + 2}  # type: ignore[attr-defined]


async def test_a_continued_stream_continues_again(row):
    async with client(front=uneven(3)) as one, client(front=uneven(4)) as other:
        body = row.request(TEXT, True, **{LENGTH: 30, TEMPERATURE: 1.0})
        whole = await streamed(one, row, body)
        first = whole[:4]
        second = (await streamed(other, row, body, id_of(first[-1])))[:3]
        third = await streamed(one, row, body, id_of(second[-1]))
        assert row.read(plain(first + second + third), True) == row.read(plain(whole), True)


async def test_without_asking_there_are_no_ids(row):
    async with client() as http:
        body = row.request(TEXT, True, **{LENGTH: 8})
        text = (await http.post(row.path_of(True), json=body)).text
        assert "id: " not in text and "event_id" not in text
        off = (await http.post(row.path_of(True), json=body, headers={"X-Kvasir-Event-Ids": "off"})).text
        assert "id: " not in off and "event_id" not in off


async def test_what_cannot_be_continued_is_refused(row):
    async with client() as http:
        body = row.request(TEXT, True, **{LENGTH: 20, SEED: 1, TEMPERATURE: 1.0})
        whole = await streamed(http, row, body)
        last = id_of(whole[-3])
        parts = last.split(".")
        cases = [
            ({}, "nonsense", 400),
            ({}, last + "0", 400),
            ({}, ".".join((*parts[:7], "0" * 8)), 409),  # other tokens
            (row.request(TEXT + "!", True, **{LENGTH: 20, SEED: 1, TEMPERATURE: 1.0}), last, 409),
            (row.request(TEXT, True, **{LENGTH: 2, SEED: 1, TEMPERATURE: 1.0}), last, 409),
        ]
        for other, id, status in cases:
            response = await http.post(row.path_of(True), json=other or body, headers={"Last-Event-ID": id})
            assert response.status_code == (422 if status == 400 and "error_type" in response.text else status), id
        assert http.app.state.http_meter.continuations == {"refused": len(cases)}  # type: ignore[attr-defined]
        alone = await http.post(row.path_of(False), json=row.request(TEXT), headers={"Last-Event-ID": last})
        assert alone.status_code in (400, 422)


async def test_several_choices_have_no_ids():
    async with client() as http:
        body = {"prompt": "abc", "n": 2, "stream": True, "max_tokens": 4}
        text = (await http.post("/v1/completions", json=body, headers=ASKED)).text
        assert "id: " not in text
        id = f"{'0' * 24}.1.1.00000000.0.1.1.00000000"
        assert (await http.post("/v1/completions", json=body, headers={"Last-Event-ID": id})).status_code == 400
