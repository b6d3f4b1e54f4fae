"""/v1/chat/completions: what it answers, streamed and whole, and what it refuses."""

from __future__ import annotations

import json
import re
import time

import pytest

from kvasir.guided.grammar import GrammarLimits
from kvasir.serve.settings import ServeSettings
from tests.serve import fakes
from tests.serve.fakes import POISON
from tests.serve.running import client, events

HI = [{"role": "user", "content": "hi"}]
PROMPT = "user: hi\nassistant: "  # what the test's template makes of it, and what the engine repeats
URL = "/v1/chat/completions"


CALLED = {"name": "f", "arguments": '{"a": 1}'}


def body(**fields) -> dict:
    return {"messages": HI, "temperature": 0, "max_tokens": 12, **fields}


async def ask(http, **fields) -> dict:
    response = await http.post(URL, json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


async def refused(http, **fields) -> dict:
    response = await http.post(URL, json=body(**fields))
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def content(http, **fields) -> str:
    return (await ask(http, **fields))["choices"][0]["message"]["content"]


async def test_the_answer_has_the_shape_of_the_api(http):
    answer = await ask(http)
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["model"] == "fake" and answer["system_fingerprint"].startswith("fp_")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "user: hi\nass", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 12,
        "total_tokens": len(PROMPT) + 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"stop": ["as"]},
        {"stop": "hi", "include_stop_str_in_output": True},
        {"logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True, "max_tokens": 3},
        {"messages": [{"role": "user", "content": "né € 😀"}], "max_tokens": 60},
        {"max_tokens": 1},
    ],
)
async def test_a_stream_is_the_whole_answer_in_pieces(http, fields):
    whole = await ask(http, **fields)
    response = await http.post(URL, json=body(**fields, stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response.text)
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    assert not any("usage" in c for c in chunks)
    if fields.get("return_token_ids"):
        reported = [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c]
        assert reported == [whole["prompt_token_ids"]]
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == choice["finish_reason"]
        assert own[-1]["stop_reason"] == choice["stop_reason"]
        assert [c["finish_reason"] for c in own[:-1]] == [None] * (len(own) - 1)
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        if fields.get("logprobs"):
            pieces = [e for c in own for e in (c["logprobs"] or {"content": []})["content"]]
            assert pieces == choice["logprobs"]["content"]
        if fields.get("return_token_ids"):
            assert [t for c in own for t in c.get("token_ids", ())] == choice["token_ids"]
            assert whole["prompt_token_ids"] == list(PROMPT.encode())


async def test_a_stream_has_the_usage_on_request(http):
    whole = await ask(http, n=2, no_cache=True)
    options = {"include_usage": True}
    chunks = events((await http.post(URL, json=body(n=2, no_cache=True, stream=True, stream_options=options))).text)
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    options["continuous_usage_stats"] = True
    chunks = events((await http.post(URL, json=body(stream=True, stream_options=options))).text)
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 12


async def test_half_a_character_never_reaches_a_stream(http):
    messages = [{"role": "user", "content": "€" * 5}]
    response = await http.post(URL, json=body(messages=messages, max_tokens=39, stream=True))
    pieces = [c["choices"][0]["delta"].get("content", "") for c in events(response.text)]
    assert "".join(pieces) == "user: €€€€€\nassistant: user: "
    assert "\ufffd" not in "".join(pieces)


async def test_logprobs_are_of_every_token(http):
    choice = (await ask(http, logprobs=True, top_logprobs=2, max_tokens=3))["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [(e["token"], e["bytes"], e["logprob"]) for e in entries] == [
        ("u", [117], -0.5),
        ("s", [115], -0.5),
        ("e", [101], -0.5),
    ]
    assert all([t["logprob"] for t in e["top_logprobs"]] == [-1.0, -2.0] for e in entries)
    assert (await ask(http, logprobs=True))["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_every_role_reaches_the_template(http):
    messages = [
        {"role": "developer", "content": "D"},
        {"role": "system", "content": [{"type": "text", "text": "S1"}, {"type": "text", "text": "S2"}]},
        {"role": "user", "content": "U", "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": CALLED}],
        },
        {"role": "tool", "content": "T", "tool_call_id": "c1"},
        {"role": "function", "content": "F", "name": "f"},
        {"role": "assistant", "content": "A", "refusal": None, "audio": None, "annotations": []},
    ]
    text = await content(http, messages=messages, max_tokens=200)
    assert text.startswith("system: D\nsystem: S1\nS2\nuser: U\nassistant: [{")
    assert '"arguments": {"a": 1}' in text
    assert "}]\ntool: T\ntool: F\nassistant: A\nassistant: " in text


async def test_tools_are_shown_to_the_model(http):
    function = {"name": "get", "description": "?", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    for choice in ("auto", "none", None):
        text = await content(http, tools=[tool], tool_choice=choice, max_tokens=100)
        assert '"name": "get"' in text
    assert (await refused(http, tools=[tool], tool_choice="required"))["param"] == "tool_choice"


async def test_the_template_can_be_steered_but_not_overridden(http):
    assert "hi\n!HEYassistant" in await content(http, chat_template_kwargs={"shout": "!HEY"}, max_tokens=40)
    taken = ({"messages": "x"}, {"tools": "x"}, {"bos_token": "x"}, {"a b": 1})
    for kwargs in (*taken, {"shout": {"a": 1}}, [1]):
        error = await refused(http, chat_template_kwargs=kwargs)
        assert error["param"] == "chat_template_kwargs", error
    assert "highassistant" in await content(http, reasoning_effort="high", max_tokens=40)
    assert (await content(http, add_generation_prompt=False)) == "user: hi\nuse"
    assert (await content(http, continue_final_message=True)) == "user: hiuser"
    error = await refused(http, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "add_generation_prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"echo": True}, "echo"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format"),
        ({"moderation": {}}, "moderation"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "more": 1}]}, "messages.0.more"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages.0.audio"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 600, "max_tokens": None}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ],
)
async def test_an_unsupported_value_is_refused_by_name(http, fields, param):
    error = await refused(http, **fields)
    assert error["param"] == param and error["type"] == "invalid_request_error", error


@pytest.mark.parametrize("tokens", [-1, 0, 500, 600, 2**40])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 50}]}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 50}]}, "max_tokens"),
        ("/v1/responses", {"input": "x" * 50}, "max_output_tokens"),
        ("/v1/completions", {"prompt": "x" * 50, "echo": False}, "max_tokens"),
    ],
)
async def test_a_length_is_refused_by_the_name_that_it_was_given(http, path, body, name, tokens):
    answer = await http.post(path, json={**body, name: tokens})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == name
    reply = set(re.findall(r"max_\w*tokens", error["message"]))
    assert reply == {name}, error["message"]


@pytest.mark.parametrize("lengths", [(4, 4), (4, 7), (7, 4), (4, None), (None, 4), (4, 600), (600, 4)])
async def test_of_two_lengths_the_lower_one_counts(http, lengths):
    answer = await ask(http, **dict(zip(("max_tokens", "max_completion_tokens"), lengths, strict=True)))
    assert answer["usage"]["completion_tokens"] == 4
    for name in ("max_tokens", "max_completion_tokens"):
        error = await refused(http, **{"max_tokens": 9, "max_completion_tokens": 9, name: -1})
        assert error["param"] == name and error["message"].startswith(f"{name} is -1")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
async def test_parts_other_than_text_are_refused_by_type(http, kind):
    parts = [{"type": "text", "text": "look"}, {"type": kind}]
    if kind != "video_url":
        parts[1][kind] = {"url": "data:,"}
    error = await refused(http, messages=[{"role": "user", "content": parts}])
    assert error["param"] == "messages.0.content.1" and kind in error["message"]


async def test_fields_without_a_meaning_here_change_nothing(http):
    plain = await ask(http)
    more = await ask(
        http,
        user="me",
        metadata={"a": "b"},
        safety_identifier="x",
        prompt_cache_key="k",
        prompt_cache_retention="in_memory",
        store=True,
        service_tier="auto",
        modalities=["text"],
        response_format={"type": "text"},
        verbosity="medium",
        parallel_tool_calls=True,
        tool_choice="auto",
        audio=None,
    )
    assert more["choices"] == plain["choices"]


async def test_an_answer_without_a_length_ends_with_the_context(http):
    answer = await ask(http, max_tokens=None)
    assert answer["usage"]["total_tokens"] == 512


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}},
        {"type": "json_object", "schema": {"const": 5}},
        {"type": "json_schema", "schema": {"const": 5}},
    ],
    ids=["as the API has it", "beside json_object", "without an object around it"],
)
async def test_a_schema_is_kept_wherever_it_stands(http, wanted):
    assert (await content(http, response_format=wanted)).strip() == "5"


async def test_log_probabilities_of_the_prompt(http):
    scores = (await ask(http, prompt_logprobs=1))["prompt_logprobs"]
    assert len(scores) == len(PROMPT) and scores[0] is None
    assert scores[1][str(ord("s"))] == {"logprob": -1.0 - 1 / 64, "rank": 1, "decoded_token": "s"}


async def test_an_answer_that_fails_is_an_error_and_no_answer(http):
    fields = {"prompt": POISON, "max_tokens": 5}
    whole = await http.post("/v1/completions", json=fields)
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "engine_error"
    assert "Secret" not in whole.text
    stream = await http.post("/v1/completions", json={**fields, "stream": True})
    assert stream.status_code == 500 and "Secret" not in stream.text


async def test_a_grammar_that_passes_its_limits_is_the_requests_fault(monkeypatch):
    """The server says which limit; the next request of the same grammar is answered."""
    monkeypatch.setattr(fakes.grammar_guides(), "limits", (GrammarLimits(states=22), GrammarLimits(states=22)))
    regex = {"structured_outputs": {"regex": "[a-z ]+|X(.{0,9}y.{0,9}z){9}"}, "max_tokens": 9, "temperature": 0}
    async with client() as http:
        for _ in range(2):
            bad = await http.post("/v1/completions", json={"prompt": "Xaybzaaybz", **regex})
            assert bad.status_code == 400, bad.text
            assert bad.json()["error"]["code"] == "invalid_value"
            assert "within its limits" in bad.json()["error"]["message"]
            good = await http.post("/v1/completions", json={"prompt": "words", **regex})
            assert good.json()["choices"][0]["text"] == "wordsword"


async def test_an_error_in_mid_stream_is_an_event_and_no_finish():
    def fault(plan):
        if plan.step >= 5:
            raise RuntimeError("secret inside")

    async with client(fault=fault) as http:
        response = await http.post(URL, json=body(stream=True, max_tokens=400))
        assert response.status_code == 200
        parts = [p.removeprefix("data: ") for p in response.text.split("\n\n") if p]
        assert json.loads(parts[-1])["error"]["code"] == "engine_error"
        assert 'finish_reason":"' not in response.text and "[DONE]" not in response.text
        assert "secret" not in response.text


async def test_a_silent_stream_sends_pings():
    async with client(ServeSettings(ping=0.05), step_seconds=0.3) as http:
        response = await http.post(URL, json=body(stream=True, max_tokens=2))
        assert response.text.startswith(": ping\n\n") and response.text.count(": ping") >= 4
        assert len(events(response.text)) == 4


async def test_an_error_after_a_ping_is_sent():
    def fault(plan):
        time.sleep(0.2)
        raise RuntimeError("broken")

    async with client(ServeSettings(ping=0.02), fault=fault) as http:
        response = await http.post(URL, json=body(stream=True))
        assert response.status_code == 200 and response.text.startswith(": ping\n\n")
        assert json.loads(response.text.split("data: ")[1])["error"]["type"] == "server_error"
