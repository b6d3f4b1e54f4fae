"""Whether a model thinks, how much, and how long: the fields that ask for it. The engine repeats its prompt."""

from __future__ import annotations

import json

import pytest

from kvasir.engine.front import Front
from kvasir.engine.thinking import may_think
from kvasir.text.chat import ChatTemplate
from tests.serve.fakes import EchoEngine, byte_tokenizer
from tests.serve.running import client

SAID = "{{ messages[0].content }}{# <think> <tool_call> #}"
SWITCH = SAID + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}#"
LEVELS = SAID + "{{ reasoning_effort }}#"
BOTH = SAID + "{{ thinking }}{{ reasoning_effort }}#"


def front(template: str, **options) -> Front:
    return Front(EchoEngine(), byte_tokenizer(), ChatTemplate(template), **({"trust_special_tokens": True} | options))


async def ask(template: str, reply: str = "Hi", status: int = 200, **fields) -> dict:
    body = {"model": "fake", "messages": [{"role": "user", "content": reply}], "temperature": 0, "max_tokens": 60}
    async with client(front=front(template)) as http:
        response = await http.post("/v1/chat/completions", json={**body, **fields})
    assert response.status_code == status, response.text
    return response.json()["error"] if status != 200 else response.json()["choices"][0]


@pytest.mark.parametrize(
    ("template", "effort", "shown"),
    [
        (SWITCH, "none", "Hi<think></think>#"),
        (SWITCH, "high", "Hi#"),
        (LEVELS, "high", "Hihigh#"),
        (BOTH, "none", "HiFalse#"),
        (BOTH, "low", "HiTruelow#"),
        ("{{ messages[0].content }}#", "none", "Hi#"),
    ],
)
async def test_effort_is_mapped_to_the_templates_levels(template, effort, shown):
    answer = await ask(template, reasoning_effort=effort, max_tokens=len(shown))
    assert answer["message"]["content"] == shown


@pytest.mark.parametrize(("template", "effort"), [(SAID, "none"), (SAID, "low"), ("{{ messages[0].content }}", "low")])
async def test_effort_that_a_template_does_not_know_is_refused(template, effort):
    error = await ask(template, reasoning_effort=effort, status=400)
    assert error["param"] == "reasoning_effort"


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize("n", [1, 2])
async def test_reasoning_ends_at_its_budget_and_the_answer_continues(n, tools):
    reply = "<think>abcdefgh</think>ijkl<eos>"
    body = {"reply": reply, "tools": tools, "n": n}
    assert (await ask(SAID, **body))["message"]["reasoning_content"] == "abcdefgh"
    bounded = await ask(SAID, **body, thinking_token_budget=3)
    assert bounded["message"]["reasoning_content"] == "abc"
    assert bounded["message"]["content"] == "hink>ijkl", "the echo goes on where it would be without"


DEFAULT_OFF = SAID + "{% if enable_thinking %} /think{% endif %}#"
THINKS = [
    (SAID, "Hi", {}, True),  # no switch: the model decides
    (SAID, "Hi", {"enable_thinking": False}, False),
    (SWITCH, "Hi", {}, True),
    (SWITCH, "Hi", {"enable_thinking": False}, False),
    (DEFAULT_OFF, "Hi", {}, False),
    (DEFAULT_OFF, "Hi", {"enable_thinking": True}, True),
    (DEFAULT_OFF, "Hi", {"enable_thinking": None}, False),
    (DEFAULT_OFF, "Hi /think", {}, True),  # what the switch would add is there
    (SAID + "{% if thinking %}<think>{% endif %}", "Hi", {}, False),
]


@pytest.mark.parametrize(("template", "reply", "variables", "thinks"), THINKS)
async def test_whether_a_chat_thinks_is_read_from_its_template(template, reply, variables, thinks):
    messages = [{"role": "user", "content": reply}]
    assert await may_think(front(template), messages, variables=variables) is thinks


@pytest.mark.few(4)
@pytest.mark.parametrize(("template", "reply", "variables", "thinks"), THINKS)
async def test_a_structure_comes_after_reasoning_only_where_the_chat_thinks(template, reply, variables, thinks):
    wanted = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 5}}}}
    answer = await ask(template, "<think>a</think>" + reply, **wanted, chat_template_kwargs=variables)
    assert answer["message"]["content"] == "5"
    assert bool(answer["message"].get("reasoning_content")) is thinks


async def test_a_budget_of_a_model_that_marks_no_reasoning_is_refused():
    error = await ask("{{ messages[0].content }}", thinking_token_budget=3, status=400)
    assert error["param"] == "thinking_token_budget"


# -- an answer that is cut within the mark that ends its reasoning ---------------------------------------------------

SECRET = "<think>Hm a < b</think>So it is."
HERE = [{"role": "user", "content": SECRET}]
ASKED = {
    "/v1/chat/completions": lambda n: {"messages": HERE, "max_tokens": n, "temperature": 0},
    "/v1/messages": lambda n: {"messages": HERE, "max_tokens": n, "temperature": 0},
    "/v1/responses": lambda n: {"input": HERE, "max_output_tokens": n, "temperature": 0},
    "/api/chat": lambda n: {"messages": HERE, "options": {"num_predict": n, "temperature": 0}},
}


def whole_of(path: str, body: dict) -> tuple[str, str]:
    """Reasoning and content of a whole answer."""
    if path == "/v1/chat/completions":
        message = body["choices"][0]["message"]
        return message.get("reasoning_content") or "", message["content"] or ""
    if path == "/v1/messages":
        return tuple("".join(b.get(kind, "") for b in body["content"]) for kind in ("thinking", "text"))
    if path == "/v1/responses":
        kinds = ("reasoning", "message")
        return tuple("".join(p["text"] for i in body["output"] if i["type"] == k for p in i["content"]) for k in kinds)
    return body["message"].get("thinking") or "", body["message"]["content"]


def streamed_of(path: str, text: str) -> tuple[str, str]:
    """The same of a stream."""
    lines = (line.removeprefix("data: ") for line in text.splitlines())
    reply = [json.loads(line) for line in lines if line.startswith("{")]
    if path == "/v1/chat/completions":
        deltas = [choice["delta"] for event in reply for choice in event["choices"]]
        return tuple("".join(d.get(kind) or "" for d in deltas) for kind in ("reasoning_content", "content"))
    if path == "/v1/messages":
        deltas = [event["delta"] for event in reply if event["type"] == "content_block_delta"]
        return tuple("".join(d.get(kind) or "" for d in deltas) for kind in ("thinking", "text"))
    if path == "/v1/responses":
        kinds = ("response.reasoning_text.delta", "response.output_text.delta")
        return tuple("".join(event["delta"] for event in reply if event["type"] == kind) for kind in kinds)
    parts = [whole_of(path, event) for event in reply]
    return "".join(p[0] for p in parts), "".join(p[1] for p in parts)


@pytest.mark.few(2)
@pytest.mark.parametrize("path", ASKED)
async def test_reasoning_that_is_cut_within_its_end_mark_is_whole_in_every_dialect_streamed_or_not(path):
    begin, end = SECRET.index(">") + 1, SECRET.index("</think>")
    async with client(front=front(SAID)) as http:
        for n in (end - 1, end, *range(end + 1, end + 8), end + 8, end + 9, len(SECRET)):
            body = {"model": "fake"} | ASKED[path](n)
            whole = (await http.post(path, json=body | {"stream": False})).json()
            stream = (await http.post(path, json=body | {"stream": True})).text
            reasoning = SECRET[begin : n if n < end + 8 else end]
            expected = reasoning, SECRET[end + 8 : max(n, end + 8)]
            assert whole_of(path, whole) == streamed_of(path, stream) == expected, n
