"""An agent on the bundled model, by the official client: tools, several turns, streams, cancels."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.server import serving
from tests.e2e.test_serve import settled
from tests.later import openai

MODEL = "kvasir-mini"
AGES = {"Anna": 31, "Peter": 54}


def tool(name: str, about: str, /, **parameters: str) -> dict:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*parameters], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = [
    tool("get_age", "Get the age of a person", name="string"),
    tool("add", "Add two numbers", a="integer", b="integer"),
]


def run(name: str, arguments: str) -> dict:
    given = json.loads(arguments)
    return {"age": AGES[given["name"]]} if name == "get_age" else {"result": given["a"] + given["b"]}


@pytest.fixture(scope="module")
def api(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


def whole(api, messages: list[dict], **fields) -> tuple[dict, str]:
    """The message of an answer as it goes into the conversation, and why it ended."""
    asked = dict(model=MODEL, messages=messages, tools=TOOLS, max_tokens=120) | fields
    choice = api.chat.completions.create(**asked).choices[0]
    return choice.message.model_dump(exclude_none=True), choice.finish_reason


def streamed(api, messages: list[dict], **fields) -> tuple[dict, str]:
    """The same, put together from chunks."""
    asked = dict(model=MODEL, messages=messages, tools=TOOLS, max_tokens=120, stream=True) | fields
    message, calls, reason = {"role": "assistant"}, {}, ""
    for chunk in api.chat.completions.create(**asked):
        choice = chunk.choices[0]
        if choice.delta.content:
            message["content"] = message.get("content", "") + choice.delta.content
        for piece in choice.delta.tool_calls or ():
            call = calls.setdefault(piece.index, {"type": "function", "function": {"name": "", "arguments": ""}})
            call["id"] = piece.id or call["id"]
            call["function"]["name"] += piece.function.name or ""
            call["function"]["arguments"] += piece.function.arguments or ""
        reason = choice.finish_reason or reason
    return message | ({"tool_calls": [calls[i] for i in sorted(calls)]} if calls else {}), reason


def converse(api, ask, questions: list[str], **fields) -> list[dict]:
    """A conversation in which every call is run, until each question has its answer in words."""
    messages: list[dict] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        for _ in range(3):
            message, reason = ask(api, messages, **fields)
            messages.append(message)
            assert (reason == "tool_calls") == ("tool_calls" in message)
            if reason != "tool_calls":
                break
            for call in message["tool_calls"]:
                result = run(call["function"]["name"], call["function"]["arguments"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
        assert messages[-1]["role"] == "assistant" and messages[-1].get("content"), "no answer in words"
    return messages


def reported(messages: list[dict]) -> list:
    """What can be compared: an id of a call is drawn anew each time."""
    calls = lambda m: [c["function"] for c in m.get("tool_calls", ())]  # noqa: E731
    return [(m["role"], m.get("content"), calls(m)) for m in messages]


def test_an_agent_calls_its_tools_and_answers_from_their_results(api):
    messages = converse(api, whole, ["How old is Anna?", "What is 123 + 456?", "How old is Peter?"], temperature=0)
    called = [c["function"]["name"] for m in messages for c in m.get("tool_calls", ())]
    assert called == ["get_age", "add", "get_age"]
    words = " ".join(m["content"] for m in messages if m["role"] == "assistant" and m.get("content"))
    assert "31" in words and "579" in words and "54" in words


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.5, "seed": 3}], ids=["greedy", "sampled"])
def test_streams_equal_whole_answers(api, fields):
    questions = ["How old is Anna?", "How old is Peter?"]
    assert reported(converse(api, streamed, questions, **fields)) == reported(converse(api, whole, questions, **fields))


@pytest.fixture
def fresh_api():
    """Of an engine that has measured no steps: it drafts at once, whatever they will take on this machine."""
    with serving("kvasir-mini") as (base, _):
        yield openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.8, "seed": 4}], ids=["greedy", "sampled"])
def test_a_prediction_of_the_answer_is_accepted_and_changes_nothing(api, fresh_api, fields):
    asked = dict(model=MODEL, max_tokens=120, extra_body={"ignore_eos": True}, **fields)
    asked["messages"] = [{"role": "user", "content": "Count from 1 to 30, please."}]
    text = api.chat.completions.create(**asked).choices[0].message.content
    answer = fresh_api.chat.completions.create(**asked, prediction={"type": "content", "content": text})
    assert answer.choices[0].message.content == text
    details = answer.usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens <= 120
    assert details.rejected_prediction_tokens <= 120


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_has_to_be_made_is_made(api, choice):
    ask = [{"role": "user", "content": "How old is Anna?"}]
    message, reason = whole(api, ask, tool_choice=choice, temperature=1.0, seed=5)
    assert reason == "tool_calls"
    for call in message["tool_calls"]:
        schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == call["function"]["name"])
        assert set(json.loads(call["function"]["arguments"])) == set(schema["properties"])
    if choice != "required":
        assert {c["function"]["name"] for c in message["tool_calls"]} == {"add"}


def test_no_call_is_made_where_none_may_be(api):
    message, reason = whole(api, [{"role": "user", "content": "How old is Anna?"}], tool_choice="none", temperature=0)
    assert reason in ("stop", "length") and "tool_calls" not in message


async def test_disconnected_agents_affect_no_others(server, api):
    expected = reported(converse(api, whole, ["How old is Anna?"], temperature=0))

    async def leave(c: openai.AsyncOpenAI, chunks: int) -> None:
        ask = [{"role": "user", "content": "Tell me a story."}]
        async with await c.chat.completions.create(
            model=MODEL, messages=ask, tools=TOOLS, stream=True, max_tokens=200, temperature=1.5, seed=chunks
        ) as stream:
            async for _ in stream:
                chunks -= 1
                if chunks <= 0:
                    return

    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="x", max_retries=0) as c:
        work = [leave(c, n) for n in range(1, 9)]
        work += [
            asyncio.to_thread(converse, api, ask, ["How old is Anna?"], temperature=0) for ask in (whole, streamed)
        ]
        results = await asyncio.gather(*work)
    assert [reported(r) for r in results if r] == [expected, expected]
    await settled(server)
