"""Responses over the wire: what an answer becomes, whole and streamed, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from tests.serve.dialects.openai.responses_help import (
    CALL,
    SAID,
    THOUGHT,
    TOOLS,
    body,
    built,
    create,
    refused,
    reported,
    same,
    thinker,
)
from tests.serve.running import client

LOGPROBS = ["message.output_text.logprobs"]


async def test_reasoning_text_and_calls_are_separate_items():
    async with client(front=thinker()) as http:
        response = await create(http, **body(tools=TOOLS))
        reasoning, message, *calls = response["output"]
        assert response["status"] == "completed" and response["completed_at"] >= response["created_at"]
        assert (reasoning["type"], reasoning["content"][0]["text"]) == ("reasoning", "I need f.")
        assert (message["role"], message["content"][0]["text"]) == ("assistant", "One moment.")
        assert [(c["type"], c["name"], c["arguments"]) for c in calls] == [("function_call", "f", '{"a": "é, }"}')] * 2
        assert {item["status"] for item in response["output"]} == {"completed"}
        assert len({item["id"] for item in response["output"]} | {c["call_id"] for c in calls}) == 6
        usage, count = response["usage"], len(SAID.encode()) + 1
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (count, count, 2 * count)
        thought = len(b"<think>\nI need f.")
        assert thought <= usage["output_tokens_details"]["reasoning_tokens"] <= len(THOUGHT.encode())


@pytest.mark.parametrize("temperature", [0.0, 0.5])
async def test_a_chat_has_the_same_text(temperature):
    async with client(front=thinker()) as http:
        response = await create(http, **body(tools=TOOLS, seed=3, temperature=temperature))
        tools = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
        asked = {"messages": [{"role": "user", "content": SAID + "<eos>"}], "tools": tools, "max_tokens": 300}
        chat = (await http.post("/v1/chat/completions", json={**asked, "seed": 3, "temperature": temperature})).json()
        texts = {item["type"]: item["content"][0]["text"] for item in response["output"] if "content" in item}
        message = chat["choices"][0]["message"]
        assert texts.get("message", "") == (message["content"] or "")
        assert texts.get("reasoning") == message.get("reasoning_content")
        assert response.get("seed") == chat["choices"][0].get("seed") == (3 if temperature else None)
        assert response["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
        thought = response["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert chat["usage"].get("completion_tokens_details", {"reasoning_tokens": 0})["reasoning_tokens"] == thought


STREAMED = [
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "max_output_tokens": 70},
    {"max_output_tokens": 5},
    {"input": "plain", "max_output_tokens": 12, "seed": 4, "temperature": 1.0},
    {"tools": TOOLS, "include": [*LOGPROBS, "reasoning.encrypted_content"], "top_logprobs": 2},
    {"input": CALL + "<eos>", "tools": TOOLS},
    {"input": "<eos>"},
    {"input": "abc", "max_output_tokens": 9, "stop": ["ca"], "top_k": 3, "seed": 1, "temperature": 0.7},
    {"metadata": {"a": "b"}, "instructions": "Do.", "user": "u", "service_tier": "flex", "truncation": "auto"},
]


@pytest.mark.few(6)
@pytest.mark.parametrize("fields", STREAMED, ids=range(len(STREAMED)))
@pytest.mark.parametrize("background", [False, True])
async def test_a_stream_is_the_whole_response_in_pieces(fields, background):
    async with client(front=thinker()) as http:
        whole = await create(http, **body(**fields))
        asked = body(**fields, stream=True, background=background)
        events = reported((await http.post("/v1/responses", json=asked)).text)
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:3] == (["created", "queued", "in_progress"] if background else [*kinds[:3]])
        assert kinds[:2] == ["created", "queued" if background else "in_progress"]
        assert [kinds.count(kind) for kind in ("created", "in_progress", whole["status"])] == [1, 1, 1]
        assert events[0]["response"]["output"] == [] and events[0]["response"]["usage"] is None
        last = events[-1]["response"]
        assert kinds[-1] == last["status"] and same(last) == same(whole)
        assert built(events) == last["output"]
        assert (await http.get(f"/v1/responses/{last['id']}")).json() == last


async def test_an_answer_that_is_cut_is_marked():
    async with client(front=thinker()) as http:
        size = len(SAID[: SAID.index("}")].encode())
        response = await create(http, **body(tools=TOOLS, max_output_tokens=size))
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
        assert response["output"][-1]["arguments"] == '{"a": "é, ' and response["completed_at"] is None


async def test_logprobs_are_of_the_texts_tokens_alone():
    async with client(front=thinker()) as http:
        response = await create(http, **body(THOUGHT + "Hé.", include=LOGPROBS, top_logprobs=3))
        reasoning, message = response["output"]
        (part,) = message["content"]
        reply = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
        assert reply.endswith("Hé.".encode()) and b"need" not in reply and "logprobs" not in reasoning["content"][0]
        assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {3}
        assert (await create(http, **body("x")))["output"][0]["content"][0]["logprobs"] == []


async def test_the_response_repeats_the_fields_of_the_request():
    async with client() as http:
        asked = {
            "instructions": "Be brief.", "max_output_tokens": 4, "metadata": {"k": "v"}, "parallel_tool_calls": False,
            "temperature": 0.5, "top_p": 0.25, "tools": TOOLS, "tool_choice": "none", "user": "u",
            "prompt_cache_key": "c", "safety_identifier": "s", "max_tool_calls": 2, "service_tier": "fast",
        }  # fmt: skip
        response = await create(http, model="fake", input="x", **asked)
        tool = {**TOOLS[0], "strict": False, "description": None}
        expected = asked | {"tools": [tool], "service_tier": "priority", "store": True, "previous_response_id": None}
        assert {name: response[name] for name in expected} == expected
        assert response["model"] == "fake" and response["error"] is None


async def test_instructions_and_items_make_the_chat_that_they_mean():
    """The echo says its prompt back, and the fake's template shows roles."""
    async with client() as http:
        call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
        items = [
            {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
            {"type": "message", "role": "user", "content": "u"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}], "id": "msg_1",
             "status": "completed", "type": "message", "phase": "commentary"},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "o"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]},
        ]  # fmt: skip
        counted = await http.post("/v1/responses/input_tokens", json={"input": items, "instructions": "i"})
        tool_call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            {"role": "system", "content": "i"},
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": "c1", "content": "o"},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        ]
        size = counted.json()["input_tokens"]
        asked = {"messages": messages, "temperature": 0, "max_tokens": size}
        chat = (await http.post("/v1/chat/completions", json=asked)).json()
        assert chat["usage"]["prompt_tokens"] == size
        response = await create(http, input=items, instructions="i", temperature=0, max_output_tokens=size)
        assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]


async def test_reasoning_comes_back_as_it_was_sent_out():
    async with client(front=thinker()) as http:
        asked = body(THOUGHT + "Yes.", include=["reasoning.encrypted_content"], store=False)
        reasoning = (await create(http, **asked))["output"][0]
        sealed = {k: v for k, v in reasoning.items() if k != "content"}
        question = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
        counts = [
            (await http.post("/v1/responses/input_tokens", json={"input": [item, *question]})).json()
            for item in (reasoning, sealed)
        ]
        assert counts[0] == counts[1] and counts[0]["input_tokens"]


async def test_too_long_input_is_refused_or_truncated_at_the_start():
    async with client(max_model_len=200) as http:
        items = [{"role": "user" if i % 2 else "assistant", "content": f"{i:02}" + "x" * 20} for i in range(20)]
        assert (await refused(http, input=items, max_output_tokens=9))["param"] == "input"
        asked = {"input": items, "max_output_tokens": 9, "instructions": "Keep.", "temperature": 0}
        response = await create(http, **asked, truncation="auto")
        dropped = response["dropped_items"]
        rest = await create(http, **asked | {"input": items[dropped:]})
        assert 0 < dropped < 20 and items[dropped]["role"] == "user"
        assert rest["usage"]["input_tokens"] == response["usage"]["input_tokens"] <= 191
        longer = await refused(http, **asked | {"input": items[dropped - 2 :]})
        assert "200" in longer["message"]
        assert (await create(http, **asked | {"input": "x"}, truncation="auto"))["dropped_items"] == 0
        assert (await refused(http, **asked | {"input": "x" * 300}, truncation="auto"))["param"] == "input"


ITEMS = [
    ({"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}, "input.0.content.0"),
    ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input.0.content.0"),
    ({"role": "user", "content": [{"type": "input_audio"}]}, "input.0.content.0"),
    ({"role": "user", "content": [{"type": "output_text", "text": "x"}]}, "input.0.content.0.type"),
    ({"role": "user", "content": [{"type": "input_text", "text": "x", "prompt_cache_breakpoint": {}}]},
     "input.0.content.0.prompt_cache_breakpoint"),
    ({"role": "tool", "content": "x"}, "input.0.role"),
    ({"role": "user"}, "input.0.content"),
    ({"role": "user", "content": "x", "extra": 1}, "input.0.extra"),
    ({"type": "web_search_call", "id": "x"}, "input.0"),
    ({"type": "local_shell_call"}, "input.0"),
    ({"type": ["message"]}, "input.0"),
    ({}, "input.0"),
    ({"type": "item_reference", "id": "msg_nobody"}, "input.0.id"),
    ({"id": f"msg_{0:048x}00000"}, "input.0.id"),
    ({"type": "function_call_output", "call_id": "c", "output": "x"}, "input.0.call_id"),
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "input.0.arguments"),
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "async": True}, "input.0.async"),
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"}, "input.0.namespace"),
    ({"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, "input.0.encrypted_content"),
    ({"type": "reasoning", "summary": [], "encrypted_content": "kvasir1.é"}, "input.0.encrypted_content"),
]  # fmt: skip
FIELDS = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [1]}, "input.0"),
    ({"input": [{"role": "user", "content": "x", "id": "a"}] * 2}, "input.1.id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"include": ["everything"]}, "include.0"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tools": [{**TOOLS[0], "async": True}]}, "tools.0.async"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "g"}, "tools": TOOLS}, "tool_choice"),
    ({"background": True, "store": False}, "store"),
    ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 600}, "max_output_tokens"),
    ({"temperature": -1.0}, "temperature"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias"),
    ({"metadata": {"k" * 65: "v"}}, None),
    ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"n": 2}, "n"),
]


@pytest.mark.parametrize(
    ("fields", "param"), [*(({"input": [item]}, place) for item, place in ITEMS), *FIELDS],
    ids=itertools.count(),
)  # fmt: skip
async def test_an_unsupported_value_is_refused_by_name(http, fields, param):
    error = await refused(http, **{"model": "fake", "input": "x", **fields})
    assert param is None or error["param"] == param
    assert error["type"] == "invalid_request_error" and error["message"]


async def test_harmless_values_of_refused_fields_are_accepted(http):
    harmless = {
        "conversation": None, "context_management": [], "truncation": "disabled", "background": False, "stream": False,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "prompt": None, "tools": [], "top_logprobs": 0,
        "reasoning": {"effort": None, "summary": None, "context": "auto"}, "tool_choice": "auto",
        "include": ["web_search_call.results"], "prompt_cache_retention": "in_memory",
    }  # fmt: skip
    await create(http, input="x", max_output_tokens=2, **harmless)


async def test_an_unknown_model_is_a_404(http):
    assert (await refused(http, status=404, model="other", input="x"))["code"] == "model_not_found"
