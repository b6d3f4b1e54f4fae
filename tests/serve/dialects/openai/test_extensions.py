"""Fields of other servers on OpenAI's routes: each has its meaning here, or is refused by name."""

from __future__ import annotations

import json
import re

import pytest

from kvasir.engine.front import Front
from kvasir.serve.settings import ServeSettings
from kvasir.text.chat import ChatTemplate
from tests.serve.dialects.openai.test_chat import PROMPT, ask, content, refused
from tests.serve.dialects.openai.test_chat_tools import CALL, front
from tests.serve.dialects.openai.test_chat_tools import ask as ask_tools
from tests.serve.dialects.openai.test_chat_tools import body as body_tools
from tests.serve.fakes import EchoEngine, byte_tokenizer
from tests.serve.running import client, events

URL = "/v1/chat/completions"
FIVE = {"const": 5}

# -- structure ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": FIVE}, "5"),
        ({"guided_json": json.dumps(FIVE)}, "5"),
        ({"json_schema": FIVE}, "5"),
        ({"json_schema": json.dumps(FIVE)}, "5"),
        ({"guided_regex": "abc"}, "abc"),
        ({"regex": "abc"}, "abc"),
        ({"guided_choice": ["xyz"]}, "xyz"),
        ({"guided_grammar": 'root ::= "abc"'}, "abc"),
        ({"ebnf": 'root ::= "abc"'}, "abc"),
        ({"grammar": 'root ::= "abc"'}, "abc"),
    ],
)
async def test_a_structure_has_many_names(http, fields, expected):
    assert (await content(http, **fields)).strip() == expected
    response = await http.post("/v1/completions", json={"prompt": "hi", "temperature": 0, "max_tokens": 12, **fields})
    assert response.json()["choices"][0]["text"].strip() == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "guided_regex": "a"}, "regex"),
        ({"grammar": 'root ::= "a"', "response_format": {"type": "json_object"}}, "grammar"),
        ({"json_schema": {"not": {}}}, "json_schema"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"ebnf": "root ::= nothing"}, "ebnf"),
    ],
)
async def test_a_structure_that_cannot_be_is_refused_by_its_name(http, fields, param):
    assert (await refused(http, **fields))["param"] == param


@pytest.mark.parametrize("ids", [[ord("q")], [ord("i"), ord("s")], [ord(" "), ord("e"), 256]])
async def test_an_answer_of_allowed_ids(http, ids):
    answer = await ask(http, allowed_token_ids=ids, return_token_ids=True, max_tokens=20)
    choice = answer["choices"][0]
    assert set(choice["token_ids"]) <= set(ids)
    assert choice["finish_reason"] == ("length" if len(choice["token_ids"]) == 20 else "stop")


@pytest.mark.parametrize("ids", [[], [-1], [10**6]])
async def test_ids_that_cannot_be_are_refused(http, ids):
    assert (await refused(http, allowed_token_ids=ids))["param"].startswith("allowed_token_ids")


async def test_text_and_another_name_can_be_combined(http):
    assert await content(http, regex="abc", response_format={"type": "text"}) == "abc"


# -- the prompt, the cache, sampling -----------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [5, 18, 1000, -1])
async def test_a_prompt_keeps_its_last_tokens(http, tokens):
    expected = PROMPT if tokens < 0 else PROMPT[-tokens:]
    answer = await ask(http, truncate_prompt_tokens=tokens)
    assert answer["usage"]["prompt_tokens"] == len(expected)
    assert answer["choices"][0]["message"]["content"] == (expected * 3)[:12]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "truncate_prompt_tokens": tokens}
    body["add_special_tokens"] = False
    assert (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"] == (expected * 3)[:12]


async def test_a_prompt_beyond_the_context_is_cut_only_if_that_is_asked_for(http):
    long = [{"role": "user", "content": "x" * 600}]
    assert (await refused(http, messages=long))["param"] == "messages"
    assert (await ask(http, messages=long, truncate_prompt_tokens=100))["usage"]["prompt_tokens"] == 100
    assert (await ask(http, messages=long, truncate_prompt_tokens=-1, max_tokens=1))["usage"]["prompt_tokens"] == 511
    assert (await refused(http, truncate_prompt_tokens=0))["param"] == "truncate_prompt_tokens"


async def test_a_request_can_stay_out_of_the_cache(http):
    def cached(answer) -> int:
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    long = [{"role": "user", "content": "y" * 200}]
    assert cached(await ask(http, messages=long, cache_prompt=True)) == 0
    assert cached(await ask(http, messages=long, cache_prompt=False)) == 0
    assert cached(await ask(http, messages=long)) > 0


async def test_the_repetition_penalty_has_two_names(http):
    assert (await refused(http, repeat_penalty=1.1, repetition_penalty=1.1))["param"] == "repeat_penalty"
    assert (await refused(http, repeat_penalty=-1.0))["message"]
    assert await ask(http, repeat_penalty=1.1)


# -- templates and thinking --------------------------------------------------------------------------------

SHOWS = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}{{ verbosity }}<eos>{# <think> #}"


def shows(template: str = SHOWS) -> Front:
    return Front(EchoEngine(), byte_tokenizer(), ChatTemplate(template), trust_special_tokens=True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ""),
        ({"enable_thinking": True}, "True"),
        ({"enable_thinking": False}, "False"),
        ({"thinking": False}, "False"),
        ({"thinking": {"type": "enabled"}}, "True"),
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"thinking": {"type": "auto"}}, ""),
        ({"reasoning": {"enabled": True}}, "True"),
        ({"reasoning": {"effort": "none"}}, "False"),
        ({"reasoning": {"effort": "high"}, "verbosity": "low"}, "Truelow"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "False"),
    ],
)
async def test_thinking_is_switched_under_all_names(fields, said):
    async with client(front=shows()) as http:
        assert await content(http, **fields) == said


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True, "thinking": False}, "enable_thinking"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning_effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ],
)
async def test_contradictions_are_refused(http, fields, param):
    error = await refused(http, **fields)
    assert error["param"].startswith(param.partition(".")[0])


async def test_a_template_without_a_switch_ends_thinking_at_once():
    async with client(front=front()) as http:
        plain = (await ask_tools(http, tools=None))["message"]
        assert plain["reasoning_content"] == "I need f."
        ended = (await ask_tools(http, tools=None, enable_thinking=False))["message"]
        assert "reasoning_content" not in ended


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "False"),
        ({"enable_thinking": True}, "True"),
        ({"reasoning_effort": "high"}, "True"),
        ({"thinking": {"type": "auto"}}, "False"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "True"),
    ],
)
async def test_a_server_can_leave_thinking_off_unless_it_is_asked_for(fields, said):
    async with client(ServeSettings(reasoning=False), front=shows()) as http:
        assert await content(http, **fields) == said
        if not fields:
            body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
            ollama = await http.post("/api/chat", json={**body, "stream": False, "options": {"temperature": 0}})
            assert ollama.json()["message"]["content"] == said
            anthropic = await http.post("/v1/messages", json={**body, "max_tokens": 9, "temperature": 0})
            assert anthropic.json()["content"][0]["text"] == said


async def test_a_server_without_thinking_ends_it_at_once_where_there_is_no_switch():
    async with client(ServeSettings(reasoning=False), front=front()) as http:
        assert "reasoning_content" not in (await ask_tools(http, tools=None))["message"]
        assert "reasoning_content" in (await ask_tools(http, tools=None, thinking_token_budget=100))["message"]


async def test_a_template_in_a_request_needs_the_flag(http):
    template = "{{ messages[0].content | upper }}"
    assert (await refused(http, chat_template=template))["param"] == "chat_template"
    async with client(ServeSettings(trust_request_chat_template=True)) as trusting:
        assert await content(trusting, chat_template=template, max_tokens=2) == "HI"
        assert (await refused(trusting, chat_template="{{ broken"))["message"]


# -- the text of reasoning ---------------------------------------------------------------------------------


async def streamed(http, **fields) -> tuple[list[dict], str]:
    response = await http.post(URL, json=body_tools(stream=True, **fields))
    assert response.status_code == 200, response.text
    chunks = [chunk for chunk in events(response.text) if chunk != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice["delta"] for choice in choices], choices[-1]["finish_reason"]


def joined(deltas: list[dict], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in deltas)


@pytest.mark.parametrize("leave_out", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
async def test_reasoning_can_be_left_out(leave_out):
    async with client(front=front()) as http:
        message = (await ask_tools(http, **leave_out))["message"]
        assert "reasoning_content" not in message and message["content"] == "One moment."
        deltas, _ = await streamed(http, **leave_out)
        assert not joined(deltas, "reasoning_content") and joined(deltas, "content").strip() == "One moment."


async def test_reasoning_can_stay_in_the_content():
    async with client(front=front()) as http:
        message = (await ask_tools(http, separate_reasoning=False))["message"]
        assert message["content"].startswith("<think>") and "</think>" in message["content"]
        assert "I need f." in message["content"] and message["content"].endswith("One moment.")
        deltas, _ = await streamed(http, separate_reasoning=False)
        text = joined(deltas, "content")
        assert text.count("<think>") == text.count("</think>") == 1
        assert text.index("I need f.") < text.index("</think>") < text.index("One moment.")
        alone, _ = await streamed(http, reply="<think>\nI", separate_reasoning=False, max_tokens=9)
        assert joined(alone, "content").endswith("</think>"), "the mark comes even if the answer is cut off"


# -- functions and custom tools ----------------------------------------------------------------------------

FUNCTIONS = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}]


async def test_functions_are_the_first_version_of_tools():
    async with client(front=front()) as http:
        choice = await ask_tools(http, reply=f"One moment.\n{CALL}", tools=None, functions=FUNCTIONS)
        assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
        assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a": "é, }"}'}
        deltas, reason = await streamed(http, reply=CALL, tools=None, functions=FUNCTIONS, function_call={"name": "f"})
        calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert reason == "function_call" and calls[0]["name"] == "f"
        assert "".join(call["arguments"] for call in calls) == '{"a": "é, }"}'
        for fields in ({"tools": body_tools()["tools"]}, {"tools": None, "tool_choice": "auto"}):
            answer = await http.post(URL, json=body_tools(functions=FUNCTIONS, **fields))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "functions")


CUSTOM = {"type": "custom", "custom": {"name": "sql", "description": "runs SQL", "format": {"type": "text"}}}
QUERY = 'SELECT "é" FROM t'
ASKED = f'<tool_call>\n{{"name": "sql", "arguments": {json.dumps({"input": QUERY}, ensure_ascii=False)}}}\n</tool_call>'


def grammar_tool(syntax: str, definition: str, kind: str = "grammar") -> dict:
    format = {"type": kind, "grammar": {"syntax": syntax, "definition": definition}}
    return {"type": "custom", "custom": {"name": "x", "format": format}}


async def test_custom_tools_are_called_with_a_text():
    async with client(front=front()) as http:
        choice = await ask_tools(http, reply=ASKED, tools=[CUSTOM])
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and call["type"] == "custom"
        assert call["custom"] == {"name": "sql", "input": QUERY}
        deltas, _ = await streamed(http, reply=ASKED, tools=[CUSTOM])
        [sent] = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert sent["custom"] == {"name": "sql", "input": QUERY} and sent["index"] == 0


async def test_custom_calls_of_the_history_reach_the_model():
    template = (
        "{% for c in messages[1].tool_calls %}{{ c.function.name }}{{ c.function.arguments.input }}{% endfor %}<eos>"
    )
    async with client(front=shows(template)) as http:
        call = {"id": "1", "type": "custom", "custom": {"name": "sql", "input": QUERY}}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
        assert await content(http, messages=turns, max_tokens=100) == f"sql{QUERY}"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom", "custom": {"name": "x", "format": {"type": "grammar"}}}, "tools.0.custom.format.grammar"),
        (grammar_tool("lark", 'start: "x"\nstart: "y"'), "tools.0.custom.format.grammar.definition"),
        (grammar_tool("lark", "start: /a(?=b)/"), "tools.0.custom.format.grammar.definition"),
        (grammar_tool("lark", 'start: %json {"type": "null"}'), "tools.0.custom.format.grammar.definition"),
        (grammar_tool("lark", "start: <|im_end|>"), "tools.0.custom.format.grammar.definition"),
        (grammar_tool("lark", 'start: ("a" | start'), "tools.0.custom.format.grammar.definition"),
        (grammar_tool("lark", "start: " + '"a" ' * 100_000), "tools.0.custom.format.grammar.definition"),
        (grammar_tool("lark", "start: " + "(" * 10_000), "tools.0.custom.format.grammar.definition"),
        (grammar_tool("ebnf", "x"), "tools.0.custom.format.grammar.syntax"),
        (grammar_tool("regex", ""), "tools.0.custom.format.grammar.definition"),
        (grammar_tool("regex", "("), "tools"),
        (grammar_tool("regex", r"(?=x)"), "tools"),
        (grammar_tool("regex", "x", "text"), "tools.0.custom.format.grammar"),
        ({"type": "custom", "function": {"name": "x"}}, "tools.0.custom"),
        ({"type": "function", "function": {"name": "x"}, "custom": {"name": "x"}}, "tools.0.function"),
        ({"type": "function"}, "tools.0.function"),
    ],
)
async def test_a_tool_that_cannot_be_is_refused(tool, param):
    async with client(front=front()) as http:
        assert (await refused(http, tools=[tool]))["param"] == param


async def test_the_text_of_a_custom_tool_follows_its_regular_expression():
    tool = grammar_tool("regex", r"SELECT \"[a-z]{2}\"; -- é\n")
    choice = {"type": "custom", "custom": {"name": "x"}}
    async with client(front=front()) as http:
        required = {"tool_choice": choice, "thinking_token_budget": 0, "max_tokens": 200}
        found = await ask_tools(http, reply="no", tools=[tool], **required)
        [call] = found["message"]["tool_calls"]
        assert re.fullmatch('SELECT "[a-z]{2}"; -- é\n', call["custom"]["input"]), call
        named = '<tool_call>\n{"name": "x", "arguments": {"input": "SELECT \\"ab'
        found = await ask_tools(http, reply=named, tools=[tool], max_tokens=200)
        [call] = found["message"]["tool_calls"]
        assert call["custom"]["input"] == 'SELECT "ab"; -- é\n', "a call that the model begins by itself follows it"


LARK = r"""
start: pair ("," pair)~0..2
pair: NAME "=" (NUMBER | "\"" /[a-z\n]{1,3}/ "\"")
NAME: /[a-z]{1,4}/
NUMBER: "1".."3" /[0-9]/?
%import common.WS
"""
PAIR = r'[a-z]{1,4}=("[a-z\n]{1,3}"|[1-3][0-9]?)'


async def test_the_text_of_a_custom_tool_follows_its_lark_grammar():
    fields = {"tools": [grammar_tool("lark", LARK)], "max_tokens": 200}
    forced = {"tool_choice": {"type": "custom", "custom": {"name": "x"}}, "thinking_token_budget": 0}
    begun = '<tool_call>\n{"name": "x", "arguments": {"input": "ab=\\"q'
    async with client(front=front()) as http:
        for reply, more, beginning in (("no", forced, ""), (begun, {}, 'ab="q')):
            found = await ask_tools(http, reply=reply, **fields, **more)
            [call] = found["message"]["tool_calls"]
            assert call["type"] == "custom" and call["custom"]["input"].startswith(beginning)
            assert re.fullmatch(f"{PAIR}(,{PAIR}){{0,2}}", call["custom"]["input"]), call


async def test_a_bad_lark_grammar_is_refused_with_its_line():
    async with client(front=front()) as http:
        for grammar, line in (("start: a\na: B C\n", "a: B C"), ("start: a\na: /x+?y/\n", "a: /x+?y/")):
            assert line in (await refused(http, tools=[grammar_tool("lark", grammar)]))["message"]


# -- fields that no server knows ---------------------------------------------------------------------------


async def test_unknown_fields_are_refused_or_listed(http):
    turns = [{"role": "user", "content": [{"type": "text", "text": "hi", "colour": "red"}], "mood": 1}]
    fields = {"messages": turns, "sparkle": {"a": 1}}
    assert (await refused(http, **fields))["message"].startswith("unrecognized field")
    async with client(ServeSettings(ignore_unknown_fields=True)) as lenient:
        plain = await ask(lenient)
        response = await lenient.post(URL, json={"temperature": 0, "max_tokens": 12, **fields})
        assert response.json()["choices"] == plain["choices"]
        listed = set(response.headers["x-kvasir-ignored-fields"].split(", "))
        assert listed == {"messages.0.content.0.colour", "messages.0.mood", "sparkle"}
        assert "x-kvasir-ignored-fields" not in (await lenient.post(URL, json={"messages": []})).headers
        stream = await lenient.post(URL, json={"stream": True, **fields, "max_tokens": 3})
        assert "sparkle" in stream.headers["x-kvasir-ignored-fields"] and "[DONE]" in stream.text
        error = (await lenient.post(URL, json={**fields, "temperature": "hot"})).json()["error"]
        assert error["param"] == "temperature"
        anthropic = {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}], "glitter": 1}
        assert (await lenient.post("/v1/messages", json=anthropic)).headers["x-kvasir-ignored-fields"] == "glitter"
