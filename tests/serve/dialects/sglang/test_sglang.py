"""SGLang's /generate: its bodies, its responses, and that other bodies of this path are TGI's."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from kvasir.serve.settings import ServeSettings
from kvasir.types import FinishReason
from tests.serve.dialects.table import objects
from tests.serve.fakes import EOS
from tests.serve.running import client

PARAMS = {"temperature": 0, "max_new_tokens": 5}
BODY = {"text": "hello", "sampling_params": PARAMS}


async def ask(http, **fields):
    return await http.post("/generate", json={**BODY, **fields})


async def answer(http, **fields):
    response = await ask(http, **fields)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(http, **fields) -> str:
    response = await ask(http, **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


async def test_a_text_is_continued(http):
    found = await answer(http, rid="mine")
    assert found["text"] == "hello" and found["output_ids"] == list(b"hello")
    meta = found["meta_info"]
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 5, 0)
    assert meta["e2e_latency"] >= 0
    assert (await http.post("/sglang/generate", json=BODY)).json()["text"] == "hello"


async def test_ids_are_continued_and_a_batch_is_a_list(http):
    assert (await answer(http, text=None, input_ids=list(b"abc")))["text"] == "abcab"
    found = await answer(http, text=["ab", "cd"], rid="r")
    assert [one["text"] for one in found] == ["ababa", "cdcdc"]
    assert [one["meta_info"]["id"] for one in found] == ["r_0", "r_1"]
    found = await answer(http, text=None, input_ids=[[97], [98, 99]], rid=["x", "y"])
    assert [one["text"] for one in found] == ["aaaaa", "bcbcb"]
    assert [one["meta_info"]["id"] for one in found] == ["x", "y"]
    assert len(await answer(http, sampling_params={**PARAMS, "n": 3, "temperature": 1})) == 3


async def test_each_prompt_of_a_batch_has_its_own_parameters(http):
    settings = [{"temperature": 0, "max_new_tokens": count} for count in (1, 3)]
    found = await answer(http, text=["abc", "xyz"], sampling_params=settings, return_logprob=[True, False])
    assert [one["text"] for one in found] == ["a", "xyz"]
    assert ["output_token_logprobs" in one["meta_info"] for one in found] == [True, False]
    assert "2 values for 1 prompts" in await refused(http, text=["abc"], sampling_params=settings)


async def test_where_a_text_ends(http):
    found = await answer(http, sampling_params={**PARAMS, "stop": "l"})
    assert found["text"] == "he" and found["meta_info"]["finish_reason"] == {"type": "stop", "matched": "l"}
    assert (await answer(http, sampling_params={**PARAMS, "stop": ["l"], "no_stop_trim": True}))["text"] == "hel"
    found = await answer(http, sampling_params={**PARAMS, "stop_token_ids": [ord("l")]})
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": ord("l")}
    found = await answer(http, text=None, input_ids=[97, 98, EOS])
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS} and found["text"] == "ab"
    assert (await answer(http, text="a", sampling_params={"temperature": 0}))["text"] == "a" * 128


async def test_log_probabilities(http):
    given = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 2, "return_text_in_logprobs": True}
    meta = (await answer(http, **given))["meta_info"]
    assert [(id, text) for _, id, text in meta["output_token_logprobs"]] == [(ord(c), c) for c in "hello"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 5
    assert [id for _, id, _ in meta["input_token_logprobs"]] == list(b"llo")
    assert meta["input_token_logprobs"][0][0] is None and meta["input_token_logprobs"][1][0] <= 0
    assert meta["input_top_logprobs"][0] is None and len(meta["input_top_logprobs"]) == 3
    meta = (await answer(http, return_logprob=True))["meta_info"]
    assert meta["input_token_logprobs"] == [] and meta["output_token_logprobs"][0][2] is None
    assert "output_top_logprobs" not in meta


@pytest.mark.parametrize("batch", [False, True])
async def test_each_event_has_the_whole_text_so_far(http, batch):
    given = {"text": ["hello", "abc"]} if batch else {}
    response = await ask(http, stream=True, return_logprob=True, **given)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    whole = await answer(http, return_logprob=True, **given)
    for i, last in enumerate(whole if batch else [whole]):
        events = [one for one in objects(response.text) if one.get("index", 0) == i]
        assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(events))
        assert [one["meta_info"]["finish_reason"] for one in events[:-1]] == [None] * (len(events) - 1)
        for one in (last, events[-1]):
            for name in ("e2e_latency", "id", "cached_tokens"):
                del one["meta_info"][name]
            one.pop("index", None)
        assert events[-1] == last


async def test_the_structure_of_a_text(http):
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    params = {"temperature": 0, "max_new_tokens": 60}
    assert json.loads((await answer(http, sampling_params={**params, "json_schema": schema}))["text"]).keys() == {"a"}
    assert (await answer(http, sampling_params={**params, "regex": "x{3}"}))["text"] == "xxx"
    assert (await answer(http, sampling_params={**params, "ebnf": 'root ::= "yes"'}))["text"] == "yes"
    message = await refused(http, sampling_params={**params, "regex": "x", "ebnf": 'root ::= "yes"'})
    assert "regex and ebnf" in message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"text": None}, "one of text and input_ids"),
        ({"input_ids": [1]}, "one of text and input_ids"),
        ({"text": ""}, "empty"),
        ({"text": []}, "empty"),
        ({"text": None, "input_ids": []}, "token ids"),
        ({"text": None, "input_ids": [[1], 2]}, "token ids"),
        ({"text": None, "input_ids": [99999]}, "input_ids"),
        ({"image_data": "x"}, "image_data"),
        ({"session_params": {"id": "1"}}, "session_params"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"nothing": 1}, "nothing"),
        ({"sampling_params": {"temperatur": 1}}, "temperatur"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "custom_params"),
        ({"return_logprob": True, "top_logprobs_num": 100}, "top_logprobs_num"),
        ({"text": ["a"] * 300}, "300 prompts"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"lora_path": "nothing"}, "nothing"),
        ({"lora_path": ["a", "b"]}, "lora_path"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(http, fields, says):
    response = await ask(http, **fields)
    assert response.status_code == 400
    assert says in response.text and "message" in response.json()["error"]


async def test_other_bodies_of_this_path_are_of_tgi(http):
    assert (await http.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 2}})).json() == {
        "generated_text": "aa"
    }
    for body in ({}, {"inputs": "a", "text": "b"}):
        assert "error_type" in (await http.post("/generate", json=body)).json()
    assert "error_type" in (await http.post("/generate", content=b"{")).json()


async def test_a_request_is_aborted_by_its_rid_and_keeps_what_it_has():
    async with client(step_seconds=0.005) as http:
        params = {"temperature": 0, "max_new_tokens": 400}
        asked = asyncio.ensure_future(answer(http, rid="mine", sampling_params=params))
        while (await http.front.stats()).generated_tokens < 3:  # type: ignore[attr-defined]
            await asyncio.sleep(0.005)
        assert (await http.post("/abort_request", json={"rid": "mine"})).json()["aborted"] == 1
        found = await asked
        assert found["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < found["meta_info"]["completion_tokens"] < 400 and found["text"].startswith("hel")
        assert FinishReason.ABORT == "abort"


async def test_the_greatest_priority_goes_first():
    async with client(max_rows=1, step_seconds=0.002) as http:
        first = asyncio.ensure_future(answer(http))
        while not (await http.front.stats()).running:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        order: list[int] = []

        async def later(priority: int) -> None:
            await answer(http, text=f"p{priority}", priority=priority)
            order.append(priority)

        await asyncio.gather(first, *(later(p) for p in (0, 5, -5)))
        assert order == [5, 0, -5]


async def test_keys_and_bounds_apply():
    async with client(ServeSettings(api_keys=("a-key-of-mine",), max_body=1000)) as http:
        assert (await ask(http)).status_code == 401
        headers = {"authorization": "Bearer a-key-of-mine"}
        assert (await http.post("/generate", json=BODY, headers=headers)).status_code == 200
        assert (await http.post("/generate", json={"text": "x" * 2000}, headers=headers)).status_code == 413
