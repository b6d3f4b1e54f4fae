"""An agent on the bundled model, by Anthropic's client: tools, several turns, streams, cancels."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.e2e.test_agents_openai import TOOLS as FUNCTIONS
from tests.e2e.test_agents_openai import run
from tests.e2e.test_serve import settled
from tests.later import anthropic, openai

MODEL = "kvasir-mini"
TOOLS = [
    {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
    for f in (tool["function"] for tool in FUNCTIONS)
]
QUESTIONS = ["How old is Anna?", "What is 123 + 456?", "How old is Peter?"]


@pytest.fixture(scope="module")
def api(server):
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def theirs(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as theirs:
        yield theirs


def asked(messages: list[dict], **fields) -> dict:
    extra = {key: fields.pop(key) for key in ("temperature", "seed") if key in fields}
    return dict(model=MODEL, messages=messages, tools=TOOLS, max_tokens=120, extra_body=extra) | fields


def whole(api, messages: list[dict], **fields):
    return api.messages.create(**asked(messages, **fields))


def streamed(api, messages: list[dict], **fields):
    with api.messages.stream(**asked(messages, **fields)) as stream:
        return stream.get_final_message()


def converse(api, ask, questions: list[str], **fields) -> list[dict]:
    """A conversation in which every call is run, until each question has its answer in words."""
    messages: list[dict] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        for _ in range(3):
            message = ask(api, messages, **fields)
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            assert (message.stop_reason == "tool_use") == bool(calls)
            if not calls:
                break
            results = [(call.id, run(call.name, json.dumps(call.input))) for call in calls]
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": json.dumps(r)} for id, r in results]
            messages.append({"role": "user", "content": blocks})
        assert any(block.type == "text" for block in messages[-1]["content"]), "no answer in words"
    return messages


def reported(messages: list[dict]) -> list:
    """The model's output without the ids of calls, which are random."""
    reply = [block for m in messages if m["role"] == "assistant" for block in m["content"]]
    return [block.text if block.type == "text" else (block.name, block.input) for block in reply]


@pytest.mark.slow
def test_an_agent_calls_its_tools_and_answers_from_their_results(api):
    reply = reported(converse(api, whole, QUESTIONS, temperature=0))
    assert [block[0] for block in reply if isinstance(block, tuple)] == ["get_age", "add", "get_age"]
    words = " ".join(block for block in reply if isinstance(block, str))
    assert "31" in words and "579" in words and "54" in words


@pytest.mark.few(1)
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.5, "seed": 3}], ids=["greedy", "sampled"])
def test_streams_equal_whole_answers(api, fields):
    assert reported(converse(api, streamed, QUESTIONS, **fields)) == reported(converse(api, whole, QUESTIONS, **fields))


def test_a_chat_of_the_openai_dialect_goes_the_same_way(api, theirs):
    messages = converse(api, whole, QUESTIONS[:1], temperature=0)
    call = messages[1]["content"][-1]
    function = {"name": call.name, "arguments": json.dumps(call.input)}
    chat = [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": messages[2]["content"][0]["content"]},
    ]
    fields = {"model": MODEL, "tools": FUNCTIONS, "temperature": 0, "max_tokens": 120}
    answer = theirs.chat.completions.create(messages=chat, **fields)
    assert answer.choices[0].message.content == messages[3]["content"][0].text
    again = whole(api, messages[:3], temperature=0).usage
    assert again.input_tokens + again.cache_read_input_tokens == answer.usage.prompt_tokens
    assert api.messages.count_tokens(model=MODEL, messages=messages[:3], tools=TOOLS).input_tokens == (
        answer.usage.prompt_tokens
    )
    assert again.cache_read_input_tokens > 0


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "add"}, {"type": "any", "disable_parallel_tool_use": True}]
)
def test_a_call_that_has_to_be_made_is_made(api, choice):
    ask = [{"role": "user", "content": "How old is Anna?"}]
    message = whole(api, ask, tool_choice=choice, temperature=1.0, seed=5)
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use" and calls
    for call in calls:
        schema = next(t["input_schema"] for t in TOOLS if t["name"] == call.name)
        assert set(call.input) == set(schema["properties"])
    assert {call.name for call in calls} <= {choice.get("name", call.name) for call in calls}
    assert len(calls) == 1 or not choice.get("disable_parallel_tool_use")


def test_an_answer_has_the_form_that_was_asked_for(api):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    ask = [{"role": "user", "content": "Tell me about Anna."}]
    message = whole(api, ask, tools=[], output_config=config, temperature=1.0, seed=2)
    assert set(json.loads(message.content[-1].text)) == {"name", "age"}  # it may have thought before


def test_a_prefill_is_continued(api, theirs):
    ask = [{"role": "user", "content": "How old is Anna?"}, {"role": "assistant", "content": "Anna is 3"}]
    message = whole(api, ask, tools=[], temperature=0)
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    fields = {"model": MODEL, "messages": ask, "temperature": 0, "max_tokens": 120, "extra_body": goes_on}
    answer = theirs.chat.completions.create(**fields)
    assert message.content[0].text == answer.choices[0].message.content
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == answer.usage.prompt_tokens
    assert message.content[0].text != whole(api, ask[:1], tools=[], temperature=0).content[0].text


async def test_disconnected_agents_affect_no_others(server, api):
    expected = reported(converse(api, whole, QUESTIONS[:1], temperature=0))

    async def leave(c: anthropic.AsyncAnthropic, events: int) -> None:
        ask = [{"role": "user", "content": "Tell me a story."}]
        stream = await c.messages.create(**asked(ask, stream=True, max_tokens=200, temperature=1.5, seed=events))
        async with stream:
            async for _ in stream:
                events -= 1
                if events <= 0:
                    return

    async with anthropic.AsyncAnthropic(base_url=server, api_key="x", max_retries=0) as c:
        work = [leave(c, n) for n in range(1, 9)]
        work += [asyncio.to_thread(converse, api, ask, QUESTIONS[:1], temperature=0) for ask in (whole, streamed)]
        results = await asyncio.gather(*work)
    assert [reported(r) for r in results if r] == [expected, expected]
    await settled(server)
