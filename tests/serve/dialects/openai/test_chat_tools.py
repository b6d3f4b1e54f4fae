"""Tool calls and reasoning over the wire: the engine repeats its prompt, so a prompt says what the model says."""

from __future__ import annotations

import json

import pytest

from kvasir.engine.front import Front
from kvasir.errors import ConfigError, InvalidRequest
from kvasir.serve.conversation.chat_format import to_tools
from kvasir.serve.conversation.tools import Tools
from kvasir.serve.dialects.openai.wire import ChatRequest
from kvasir.text.chat import ChatTemplate
from tests.later import openai
from tests.serve.fakes import EchoEngine, byte_tokenizer
from tests.serve.running import client, events, live

TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    }
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é, }"}}\n</tool_call>'
SAID = f"<think>\nI need f.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"
TEMPLATE = "{{ messages[0].content }}{# <think> <tool_call> #}"


def tools_of(wire: ChatRequest) -> Tools:
    return to_tools(wire.tools, wire.tool_choice, wire.parallel_tool_calls)


def front(**options) -> Front:
    return Front(EchoEngine(), byte_tokenizer(), ChatTemplate(TEMPLATE), trust_special_tokens=True, **options)


def body(reply: str = SAID, **fields) -> dict:
    """The answer repeats the prompt once."""
    prompt = [{"role": "user", "content": reply + "<eos>"}]
    return {"messages": prompt, "model": "fake", "temperature": 0, "max_tokens": 300, "tools": TOOLS, **fields}


async def ask(http, **fields) -> dict:
    response = await http.post("/v1/chat/completions", json=body(**fields))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def test_calls_and_reasoning_come_apart_from_the_content():
    async with client(front=front()) as http:
        choice = await ask(http)
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["content"], message["reasoning_content"]) == ("One moment.", "I need f.")
        assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": '{"a": "é, }"}'}] * 2
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert {call["type"] for call in message["tool_calls"]} == {"function"}
        alone = (await ask(http, reply=CALL))["message"]
        assert alone["content"] is None and "reasoning_content" not in alone


# As DeepSeek-R1-Distill-Llama has it: calls are shown beside null alone, and their arguments are pasted as text.
NULL_ONLY = (
    "{% for m in messages %}{% if m.role == 'assistant' and m['content'] is none %}{% for c in m.tool_calls %}"
    "{{ '[' + c.function.name + c.function.arguments + ']' }}{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
async def test_calls_of_the_history_reach_the_model(content):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "tool_calls": [call], **content}
    messages = [{"role": "user", "content": "a"}, asked, {"role": "tool", "tool_call_id": "1", "content": "x<eos>"}]
    echo = Front(EchoEngine(), byte_tokenizer(), ChatTemplate(NULL_ONLY), trust_special_tokens=True)
    async with client(front=echo) as http:
        answer = await ask(http, messages=messages, tools=None)
    assert answer["message"]["content"] == 'a[f{"a": 1}]x'


UNKNOWN = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<call {{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}{# <tool_call> #}"
)


async def test_calls_in_an_unknown_format_are_content_and_cannot_be_required():
    """The template writes calls, in no known format: what it says besides is not taken for one."""
    unknown = Front(EchoEngine(), byte_tokenizer(), ChatTemplate(UNKNOWN), trust_special_tokens=True)
    async with client(front=unknown) as http:
        choice = await ask(http, reply=CALL)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        for wanted in ("required", {"type": "function", "function": {"name": "f"}}):
            response = await http.post("/v1/chat/completions", json=body(tool_choice=wanted))
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tool_choice")
            assert "<call look_up" in error["message"] and "--tool-format" in error["message"]
    named = Front(
        EchoEngine(), byte_tokenizer(), ChatTemplate(UNKNOWN), tool_format="hermes", trust_special_tokens=True
    )
    async with client(front=named) as http:
        assert (await ask(http, reply=CALL))["finish_reason"] == "tool_calls"


ADDRESSED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '>>>all\n' + m.content if m.content else '' }}"
    "{% for c in m.tool_calls or [] %}>>>{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}>>>{% endif %}"
)


async def test_recipients_are_no_content_and_their_calls_cannot_be_required():
    """The template has written the mark before the first recipient, with tools and without."""
    echo = Front(EchoEngine(), byte_tokenizer(), ChatTemplate(ADDRESSED), trust_special_tokens=True)
    async with client(front=echo) as http:
        assert (await ask(http, reply="all\nHello", tools=None))["message"]["content"] == "Hello"
        message = (await ask(http, reply='all\nHello>>>f\n{"a": "b"}'))["message"]
        call = message["tool_calls"][0]["function"]
        assert (message["content"], call) == ("Hello", {"name": "f", "arguments": '{"a": "b"}'})
        response = await http.post("/v1/chat/completions", json=body(tool_choice="required"))
        assert response.status_code == 400 and "enforced" in response.json()["error"]["message"]


async def test_the_summary_names_the_flag_for_an_unknown_tool_format():
    for source, reported in ((UNKNOWN, True), (TEMPLATE, False)):
        started = Front(EchoEngine(), byte_tokenizer(), ChatTemplate(source), warm=True)
        await started.start()
        try:
            assert any("--tool-format" in line and "<call" in line for line in started.summary()) is reported
        finally:
            await started.stop()


async def test_duplicate_tool_names_are_refused():
    async with client(front=front()) as http:
        answer = await http.post("/v1/chat/completions", json=body(tools=TOOLS * 2, tool_choice="none"))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        response = {"model": "fake", "input": "x", "tools": [{"type": "function", **TOOLS[0]["function"]}] * 2}
        assert (await http.post("/v1/responses", json=response)).json()["error"]["param"] == "tools"
        answer = await http.post(
            "/api/chat", json={"model": "fake", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS * 2}
        )
        assert answer.status_code == 400 and "tools" in answer.json()["error"]


@pytest.mark.few(2)
@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "return_token_ids": True}, {"n": 2}, {"max_tokens": 70}])
async def test_a_stream_is_the_whole_answer_in_pieces(fields):
    async with client(front=front()) as http:
        whole = await ask(http, **fields)
        text = (await http.post("/v1/chat/completions", json=body(**fields, stream=True))).text
        own = [chunk["choices"][0] for chunk in events(text) if chunk["choices"][0]["index"] == 0]
        deltas = [choice["delta"] for choice in own]
        for name in ("content", "reasoning_content"):
            reply = "".join(delta.get(name, "") for delta in deltas)
            assert reply == (whole["message"].get(name) or "")
        calls: dict[int, dict] = {}
        for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
            if "id" in piece:
                calls[piece["index"]] = {"name": piece["function"]["name"], "arguments": ""}
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
        assert list(calls.values()) == [call["function"] for call in whole["message"].get("tool_calls", ())]
        assert own[-1]["finish_reason"] == whole["finish_reason"]
        if fields.get("logprobs"):
            assert [e for c in own for e in (c["logprobs"] or {"content": []})["content"]] == whole["logprobs"][
                "content"
            ]
            assert [t for c in own for t in c.get("token_ids", ())] == whole["token_ids"]


async def test_an_answer_that_is_cut_is_marked():
    async with client(front=front()) as http:
        choice = await ask(http, max_tokens=len((SAID[: SAID.index("}")]).encode()))
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": "é, '


async def test_without_callable_tools_calls_are_content():
    async with client(front=front()) as http:
        for fields in ({"tools": None}, {"tool_choice": "none"}):
            choice = await ask(http, reply=CALL, **fields)
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_formats_are_named_by_options():
    async with client(front=front(tool_format="none", reasoning_format="none")) as http:
        assert (await ask(http))["message"] == {"role": "assistant", "content": SAID, "refusal": None}
    async with client(front=front(tool_format="mistral_args")) as http:
        call = (await ask(http, reply="[TOOL_CALLS]f[ARGS]{}"))["message"]["tool_calls"][0]
        assert call["function"] == {"name": "f", "arguments": "{}"} and len(call["id"]) == 9 and call["id"].isalnum()
    with pytest.raises(ConfigError, match="tool format"):
        front(tool_format="klingon")


async def test_marks_that_are_special_tokens_reach_the_parser():
    """They are skipped in text by default, but without them a call could not be seen."""
    reply = '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}<|call|>'
    async with client(front=front(tool_format="harmony")) as http:
        message = (await ask(http, reply=reply))["message"]
        assert message["content"] is None
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "x"}'}


async def test_reasoning_that_the_prompt_opens():
    """The echo begins where the prompt begins, so this prompt both opens the reasoning and says its end."""
    async with client(front=front()) as http:
        prompt = [{"role": "user", "content": "Deep.</think>Done.<think>"}]
        fields = {"messages": prompt, "max_tokens": len("Deep.</think>Done."), "tools": None}
        message = (await ask(http, **fields))["message"]
        assert (message["reasoning_content"], message["content"]) == ("Deep.", "Done.")


def test_the_official_client_reads_calls():
    with live(front=front()) as server:
        own = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        whole = own.chat.completions.create(**body())
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls" and message.tool_calls
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": "é, }"}
        with own.chat.completions.stream(**body()) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls" and final.message.tool_calls
        assert [call.function.arguments for call in final.message.tool_calls] == ['{"a": "é, }"}'] * 2
        assert final.message.content == "One moment."


def test_allowed_tools_restrict_the_callable_tools():
    g = {"type": "function", "function": {"name": "g"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [g]}}
    wire = ChatRequest.model_validate(body(tools=[*TOOLS, g], tool_choice=choice))
    assert [tool["function"]["name"] for tool in tools_of(wire).all] == ["f", "g"]
    assert tools_of(wire).callable() == [g]
    with pytest.raises(InvalidRequest, match="names 'g'"):
        tools_of(ChatRequest.model_validate(body(tool_choice=choice))).callable()


async def test_the_summary_warns_of_calls_that_cannot_be_parsed():
    for source, reply in (("{{ m.tool_calls[0].function }}", True), (TEMPLATE, False)):
        written = (
            "{% for m in messages %}{{ m.content or '' }}{% if m.tool_calls %}" + source + "{% endif %}{% endfor %}"
        )
        front = Front(EchoEngine(), byte_tokenizer(), ChatTemplate(written if reply else source), warm=True)
        await front.start()
        assert any("calls come back as content" in line for line in front.summary()) is reply
        await front.stop()
