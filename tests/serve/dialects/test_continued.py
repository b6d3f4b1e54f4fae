"""A stream that breaks continues at another server, wherever it broke: what both sent is the unbroken stream."""

from __future__ import annotations

import random
import re
from contextlib import aclosing

import httpx
import pytest

from kvasir.engine.front import Front
from kvasir.serve.conversation.event_ids import _join
from kvasir.serve.settings import ServeSettings
from kvasir.types import Request
from tests.serve.dialects.table import DEADLINE, LENGTH, ROWS, SEED, STOP, TEMPERATURE, Row, objects
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
        held = {}
        async with aclosing(submit(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                i = delta.index
                held[i] = _join(held[i], delta) if i in held else delta
                if delta.finish_reason or rng.random() < 0.5:
                    yield held.pop(i)

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


SEVERAL = {
    "/v1/completions": {"prompt": TEXT, "n": 3, "max_tokens": 24, "logprobs": 1, "stop": ["in it"]},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": TEXT}],
        "n": 3,
        "max_tokens": 24,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "stop": ["and"],
    },
    "/completion": {
        "prompt": TEXT,
        "n_cmpl": 3,
        "n_predict": 24,
        "n_indent": 4,
        "stop": ["and"],
        "return_tokens": True,
    },
}


def by_choice(events: list[str]) -> tuple[dict[int, list], list[str]]:
    """Of each choice what all its events say, and the events of no choice."""
    found: dict[int, list] = {}
    others = []
    for event in events:
        try:
            [body] = objects(plain([event]))
            [body] = body.get("choices", [body])
        except ValueError:
            others.append(re.sub(r',"prompt_tokens_details":{[^}]*}', "", plain([event])))
            continue
        text = body.get("text") or body.get("content") or (body.get("delta") or {}).get("content") or ""
        end = body.get("finish_reason") or body.get("stop_type")
        said = found.setdefault(body["index"], ["", [], None])
        said[0] += text
        said[1] += body.get("token_ids") or body.get("tokens") or []
        said[2] = said[2] or end
    return found, others


PROMPTS = [TEXT, TEXT + "or without, ", TEXT]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        *((path, {"seed": 7}) for path in SEVERAL),
        ("/v1/completions", {"prompt": PROMPTS, "n": 1, "seed": 7}),
        ("/v1/completions", {"prompt": PROMPTS, "n": 1, "stream_options": {"include_usage": True}}),
        ("/completion", {"prompt": PROMPTS, "n_cmpl": 1, "seed": 7}),
        ("/completion", {"prompt": PROMPTS[:2], "n_cmpl": 2}),
    ],
)
async def test_streams_of_several_choices_continue(path, asked):
    """Of one prompt or of several. Some of the choices end at a stop string, within a delta or between two."""
    body = {**SEVERAL[path], "stream": True, "temperature": 1.0, **asked}
    end = "word" if path == "/completion" else "stop"
    async with client(front=uneven(5)) as one, client(front=uneven(6)) as other:
        response = await one.post(path, json=body, headers=ASKED)
        whole = events_of(response.text)
        ids = [id_of(event) for event in whole]
        assert len(set(ids)) == len(ids) > 12, ids
        wanted = by_choice(whole)
        several = isinstance(body.get("prompt"), list)
        assert len(wanted[0]) == (len(body["prompt"]) if several else 1) * (body.get("n") or body.get("n_cmpl") or 1)
        assert several or {said[2] for said in wanted[0].values()} > {end}
        counts = (*range(1, len(whole), 4), len(whole) - 2, len(whole) - 1, len(whole))
        for count in counts:
            response = await other.post(path, json=body, headers={"Last-Event-ID": ids[count - 1]})
            assert response.status_code == 200, response.text
            rest = events_of(response.text)
            found = by_choice(whole[:count] + rest)
            assert found == wanted, count
            assert id_of((whole[:count] + rest)[-1]).split(".")[0] == ids[0].split(".")[0]
        assert other.app.state.http_meter.continuations == {"continued": len(counts)}  # type: ignore[attr-defined]


async def test_the_choices_that_a_client_has_must_be_the_same():
    async with client() as http:
        body = {"prompt": "abc", "n": 2, "stream": True, "max_tokens": 8, "temperature": 1.0, "seed": 3}
        whole = events_of((await http.post("/v1/completions", json=body, headers=ASKED)).text)
        *head, tokens, choice, ends = id_of(whole[5]).split(".")
        cases = [
            ((*head, f"{int(tokens, 16) ^ 1:08x}", choice, ends), 409),
            ((*head, tokens, choice, ends + "-1"), 400),
            ((*head, tokens, "2", ends), 400),
            ((*head, tokens, choice, ends.replace("-", "1-1")), 400),
            ((*head, tokens), 400),
            ((*head[:5], head[4], *head[6:], tokens, choice, ends), 400),
        ]
        for parts, status in cases:
            headers = {"Last-Event-ID": ".".join(parts)}
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == status, parts


async def test_prompts_without_a_seed_get_different_ones():
    async with client() as http:
        body = {"prompt": ["abc"] * 3, "stream": True, "max_tokens": 12, "temperature": 1.0}
        text = (await http.post("/v1/completions", json=body, headers=ASKED)).text
        assert len(set(re.findall(r'"seed":(\d+)', text))) == 3


async def test_more_prompts_or_choices_than_an_id_names_have_none():
    async with client(settings=ServeSettings(max_answers=2000)) as http:
        for asked in ({"prompt": ["abc"] * 65}, {"prompt": ["abc"] * 3, "n": 86}):
            body = {**asked, "stream": True, "max_tokens": 1}
            text = (await http.post("/v1/completions", json=body, headers=ASKED)).text
            assert "id: " not in text and "[DONE]" in text
            id = f"{'0' * 24}.1.1.00000000.0.1.1.00000000"
            assert (await http.post("/v1/completions", json=body, headers={"Last-Event-ID": id})).status_code == 400
