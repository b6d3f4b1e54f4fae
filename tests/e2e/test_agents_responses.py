"""An agent on the bundled model, by the Responses API: conversations kept by the server, tools, streams, cancels, and
a server that is killed."""

from __future__ import annotations

import asyncio
import json

import pydantic
import pytest

from tests.e2e.server import serving
from tests.e2e.test_agents_openai import TOOLS as FUNCTIONS
from tests.e2e.test_agents_openai import run
from tests.e2e.test_serve import settled
from tests.later import openai
from tests.serve.http.test_streams import wait_until

pytestmark = pytest.mark.slow

MODEL = "kvasir-mini"
TOOLS = [{"type": "function", **tool["function"]} for tool in FUNCTIONS]
QUESTIONS = ["How old is Anna?", "What is 123 + 456?", "How old is Peter?"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "kept"
    with serving(MODEL, "--max-num-seqs", "8", "--data-dir", str(folder)) as (base, _):
        yield base


@pytest.fixture(scope="module")
def api(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as api:
        yield api


def whole(api, **fields):
    return api.responses.create(**dict(model=MODEL, tools=TOOLS, max_output_tokens=120) | fields)


def streamed(api, **fields):
    """The response that the deltas of a stream tell of, which must be the one that it ends with."""
    texts: dict[int, str] = {}
    for event in whole(api, stream=True, **fields):
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    for index, item in enumerate(event.response.output):
        reply = item.arguments if item.type == "function_call" else item.content[0].text
        assert texts.get(index, "") == reply
    return event.response


def background(api, **fields):
    id = whole(api, background=True, **fields).id
    wait_until(lambda: api.responses.retrieve(id).status not in ("queued", "in_progress"), 30)
    return api.responses.retrieve(id)


def converse(api, ask, questions: list[str], kept: bool, **fields) -> list:
    """The model's output in a conversation in which every call is run. kept: the server keeps the conversation;
    otherwise it is sent whole."""
    items, reply, previous = [], [], None
    for question in questions:
        new: list = [{"role": "user", "content": question}]
        for _ in range(3):
            items += new
            given = {"input": new, "previous_response_id": previous} if kept else {"input": items, "store": False}
            response = ask(api, **given, **fields)
            previous = response.id
            items += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            reply += [(c.name, c.arguments) for c in calls] or [response.output_text]
            if not calls:
                break
            new = [
                {"type": "function_call_output", "call_id": c.call_id, "output": json.dumps(run(c.name, c.arguments))}
                for c in calls
            ]
        assert response.output_text, "no answer in words"
    return reply


def chatted(api, questions: list[str], **fields) -> list:
    """The same by chat completions."""
    messages, reply = [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        for _ in range(3):
            answer = api.chat.completions.create(
                model=MODEL, tools=FUNCTIONS, max_tokens=120, messages=messages, **fields
            ).choices[0].message  # fmt: skip
            messages.append(answer.model_dump(exclude_none=True))
            calls = [call.function for call in answer.tool_calls or ()]
            reply += [(c.name, c.arguments) for c in calls] or [answer.content]
            if not calls:
                break
            for call in answer.tool_calls:
                result = json.dumps(run(call.function.name, call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return reply


def test_an_agent_calls_its_tools_and_answers_from_their_results(api):
    reply = converse(api, whole, QUESTIONS, kept=True, temperature=0)
    assert [call[0] for call in reply if isinstance(call, tuple)] == ["get_age", "add", "get_age"]
    words = " ".join(text for text in reply if isinstance(text, str))
    assert "31" in words and "579" in words and "54" in words


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 0.5, "extra_body": {"seed": 3}}])
def test_streamed_background_whole_and_chat_answers_are_equal(api, fields):
    reply = converse(api, whole, QUESTIONS[:2], kept=True, **fields)
    assert converse(api, streamed, QUESTIONS[:2], kept=True, **fields) == reply
    assert converse(api, streamed, QUESTIONS[:2], kept=False, **fields) == reply
    assert converse(api, background, QUESTIONS[:2], kept=True, **fields) == reply
    assert chatted(api, QUESTIONS[:2], **fields) == reply


def test_earlier_turns_are_read_from_the_cache(api):
    first = whole(api, input="How old is Anna?", temperature=0)
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": '{"age": 31}'}
    second = whole(api, input=[output], previous_response_id=first.id, temperature=0)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 2


ADD = {"type": "function", "name": "add"}


@pytest.mark.parametrize("mode", ["auto", "required", None])
def test_a_choice_of_tools_is_kept(api, mode):
    """Of the allowed tools, one that has to be called, or a named one: never the tool that the question is for."""
    choice = {"type": "allowed_tools", "mode": mode, "tools": [ADD]} if mode else ADD
    for seed in range(3):
        response = whole(api, input="How old is Anna?", tool_choice=choice, temperature=1.0, extra_body={"seed": seed})
        calls = [item for item in response.output if item.type == "function_call"]
        assert {call.name for call in calls} <= {"add"} and (calls or mode == "auto")
        for call in calls:
            assert set(json.loads(call.arguments)) == {"a", "b"}


def test_a_format_is_followed_and_a_strict_tool_called_well(api):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
              "additionalProperties": False}  # fmt: skip
    format = {"type": "json_schema", "name": "age", "schema": schema, "strict": True}
    for temperature in (0.0, 1.5):
        fields = {"input": "How old is Anna?", "tools": [], "text": {"format": format}, "temperature": temperature}
        response = whole(api, **fields, extra_body={"seed": 1})
        assert set(json.loads(response.output_text)) == {"age"}
        assert streamed(api, **fields, extra_body={"seed": 1}).output_text == response.output_text
    bad = {**schema, "properties": {"age": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        whole(api, input="x", tools=[], text={"format": {**format, "schema": bad}})
    assert caught.value.param == "text.format"
    whole(api, input="How old is Anna?", tools=[{**TOOLS[0], "strict": True}], temperature=1.2)


class Age(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def test_the_client_parses_what_it_asked_for(api):
    asked = {"model": MODEL, "input": "How old is Anna?", "max_output_tokens": 80, "temperature": 0}
    parsed = api.responses.parse(**asked, text_format=Age)
    assert isinstance(parsed.output_parsed, Age)
    with api.responses.stream(**asked, text_format=Age) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == parsed.output_parsed


async def test_disconnected_and_cancelled_agents_affect_no_others(server, api):
    expected = converse(api, whole, QUESTIONS[:1], kept=True, temperature=0)
    asked = dict(model=MODEL, input="Tell me a story.", max_output_tokens=200, stream=True, temperature=1.5)

    async def leave(c: openai.AsyncOpenAI, count: int, cancel: bool) -> None:
        async with await c.responses.create(**asked, background=cancel) as stream:
            async for event in stream:
                if event.type == "response.created":
                    id = event.response.id
                if event.sequence_number >= count:
                    break
        if cancel:
            assert (await c.responses.cancel(id)).status in ("cancelled", "completed", "incomplete")

    async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="x", max_retries=0) as c:
        work = [leave(c, n, cancel=bool(n % 2)) for n in range(3, 11)]
        work += [asyncio.to_thread(converse, api, ask, QUESTIONS[:1], True, temperature=0) for ask in (whole, streamed)]
        results = await asyncio.gather(*work)
    assert [reply for reply in results if reply] == [expected, expected]
    await settled(server)


@pytest.mark.slow
def test_a_restarted_server_keeps_responses_and_marks_lost_ones_as_failed(tmp_path):
    flags = ("--data-dir", str(tmp_path / "kept"))
    with serving(MODEL, *flags) as (base, process):
        with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as api:
            done = whole(api, input="How old is Anna?", temperature=0)
            lost = whole(api, input="Tell me a story.", background=True, max_output_tokens=400,
                         extra_body={"ignore_eos": True}, tools=[])  # fmt: skip
            wait_until(lambda: api.responses.retrieve(lost.id).status == "in_progress")
        process.kill()
        process.wait()
        process.returncode = 0  # as it was meant to be
    with serving(MODEL, *flags) as (base, _), openai.OpenAI(base_url=f"{base}/v1", api_key="none") as api:
        assert api.responses.retrieve(done.id) == done
        failed = api.responses.retrieve(lost.id)
        assert failed.status == "failed" and "server" in failed.error.message
        (call,) = done.output
        output = {"type": "function_call_output", "call_id": call.call_id, "output": '{"age": 31}'}
        assert "31" in whole(api, input=[output], previous_response_id=done.id, temperature=0).output_text
