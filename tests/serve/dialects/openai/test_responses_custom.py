"""Custom tools of responses: calls with a text, whole and streamed, and back again as input."""

from __future__ import annotations

import json
import re

import pytest

from kvasir.serve.conversation.custom import CustomText, custom_input
from tests.later import openai
from tests.serve.dialects.openai.responses_help import body, built, create, refused, reported, same, thinker
from tests.serve.running import client, live

QUERY = 'SELECT "é" -- \\\n😀'
SQL = {"type": "custom", "name": "sql", "description": "runs SQL"}
FORCED = {"type": "custom", "name": "sql"}
SHORT = {"type": "grammar", "syntax": "lark", "definition": 'start: WORD ("," WORD)~1..2\nWORD: /[a-c"]{2}/'}


def asked(text: str = QUERY, more: str = "") -> str:
    """What a model says that calls the tool."""
    arguments = json.dumps({"input": text}, ensure_ascii=False)[:-1] + more + "}"
    return f'<tool_call>\n{{"name": "sql", "arguments": {arguments}}}\n</tool_call>'


async def test_a_custom_tool_is_called_with_a_text():
    async with client(front=thinker()) as http:
        response = await create(http, **body(asked(), tools=[SQL]))
        [call] = response["output"]
        assert call["id"].startswith("ctc_") and call["status"] == "completed"
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "sql", QUERY)
        assert response["tools"] == [SQL | {"format": {"type": "text"}}]


@pytest.mark.parametrize("said", [asked(), asked("ab\\"), asked("", ', "more": 1'), asked()[:70], asked()[:52]])
async def test_a_stream_of_custom_calls_is_the_whole_response_in_pieces(said):
    async with client(front=thinker()) as http:
        fields = body(said, tools=[SQL], max_output_tokens=len(said.encode()))
        whole = await create(http, **fields)
        events = reported((await http.post("/v1/responses", json=fields | {"stream": True})).text)
        assert built(events) == events[-1]["response"]["output"] and same(events[-1]["response"]) == same(whole)
        if said == asked():
            deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
            assert len(deltas) > 5 and "".join(deltas) == QUERY


async def test_calls_and_their_outputs_make_the_chat_that_they_mean():
    async with client() as http:
        call = {"type": "custom_tool_call", "call_id": "c1", "name": "sql", "input": QUERY}
        output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "3 rows"}
        items = [{"role": "user", "content": "u"}, call, output]
        counted = await http.post("/v1/responses/input_tokens", json={"input": items, "tools": [SQL]})
        made = {"id": "c1", "type": "custom", "custom": {"name": "sql", "input": QUERY}}
        messages = [
            {"role": "user", "content": "u"},
            {"role": "assistant", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c1", "content": "3 rows"},
        ]
        tools = [{"type": "custom", "custom": {"name": "sql", "description": "runs SQL"}}]
        chat = await http.post("/v1/chat/completions", json={"messages": messages, "tools": tools, "max_tokens": 1})
        assert counted.json()["input_tokens"] == chat.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "choice",
    [FORCED, "required", {"type": "allowed_tools", "mode": "required", "tools": [FORCED]}],
    ids=["named", "required", "allowed"],
)
async def test_a_text_follows_its_grammar_where_a_call_is_required(choice):
    tools = [SQL | {"format": SHORT}, {"type": "function", "name": "f", "parameters": {"type": "object"}}]
    if choice == "required":
        del tools[1]
    async with client(front=thinker()) as http:
        response = await create(http, **body("no", tools=tools, tool_choice=choice, thinking_token_budget=0))
        call = response["output"][-1]
        assert call["type"] == "custom_tool_call" and re.fullmatch(r'[a-c"]{2}(,[a-c"]{2}){1,2}', call["input"])
        assert response["tools"][0]["format"] == SHORT and response["tool_choice"] == choice


def test_the_vendors_client_calls_a_custom_tool_and_answers_it():
    with live(front=thinker()) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        fields = {"model": "fake", "tools": [SQL], "temperature": 0}
        with api.responses.stream(**fields, input=asked() + "<eos>", max_output_tokens=300) as stream:
            kinds = [event.type for event in stream]
            response = stream.get_final_response()
        assert "response.custom_tool_call_input.done" in kinds
        [call] = response.output
        assert isinstance(call, openai.types.responses.ResponseCustomToolCall) and call.input == QUERY
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done<eos>"}
        again = api.responses.create(
            **fields, input=[{"role": "user", "content": "u"}, call.to_dict(), output], max_output_tokens=20
        )
        assert again.output_text == "done"
        later = api.responses.create(**fields, input=[output], previous_response_id=response.id, max_output_tokens=20)
        assert later.output_text == "done"
        listed = api.responses.input_items.list(later.id, order="asc").data
        assert listed[0].type == "custom_tool_call_output"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0.name"),
        ({"tools": [SQL | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [SQL | {"format": {"type": "grammar"}}]}, "tools.0.format"),
        ({"tools": [SQL | {"format": {"type": "text", "syntax": "lark", "definition": "x"}}]}, "tools.0.format"),
        ({"tools": [SQL | {"format": {**SHORT, "syntax": "ebnf"}}]}, "tools.0.format.syntax"),
        ({"tools": [SQL | {"format": {**SHORT, "definition": "start: A"}}]}, "tools.0.format.definition"),
        ({"tools": [SQL, SQL]}, "tools"),
        ({"tools": [SQL], "tool_choice": {"type": "custom", "name": "other"}}, "tool_choice"),
        ({"input": [{"type": "custom_tool_call"}]}, "input.0.call_id"),
        ({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}, "input.0.call_id"),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
                ]
            },
            "input.1.call_id",
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_name(fields, param):
    async with client(front=thinker()) as http:
        assert (await refused(http, **{"model": "fake", "input": "x", **fields}))["param"] == param


@pytest.mark.parametrize("text", ["", QUERY, 'a"b', "\\u0041", "\x7f\b"])
@pytest.mark.parametrize("ascii", [True, False])
def test_a_text_is_read_from_any_pieces(text, ascii):
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    for size in (1, 2, 7, 99):
        reader = CustomText()
        pieces = [reader.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
        assert "".join([*pieces, reader.rest()]) == text
    for end in range(len(arguments)):
        assert text.startswith(custom_input(arguments[:end])) or end <= arguments.index(": ") + 2
