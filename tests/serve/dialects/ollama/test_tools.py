"""Tools, thinking and their shapes in Ollama's API: the engine repeats its prompt, so prompts determine output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import ollama
import pytest

from kvasir.engine.front import Front
from kvasir.text.chat import ChatTemplate
from tests.serve.fakes import VOCAB, EchoEngine, byte_tokenizer
from tests.serve.running import live
from tests.text.test_fim import QWEN, tokenizer

GREEDY = {"temperature": 0, "num_predict": 12}
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "é, }"}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"
THINKER = "{{ messages[-1].content }}{% if enable_thinking %}{% endif %}{# <think> <tool_call> #}"


def thinker(source: str = THINKER) -> Front:
    return Front(EchoEngine(), byte_tokenizer(), ChatTemplate(source), trust_special_tokens=True)


@contextmanager
def speaker(front: Front) -> Iterator[ollama.Client]:
    with live(front=front) as server, ollama.Client(host=server.url) as own:
        yield own


def speaking(reply: str = SAID, **fields) -> dict:
    """The answer repeats the prompt once."""
    messages = [{"role": "user", "content": reply + "<eos>"}]
    return {"model": "fake", "messages": messages, "tools": [TOOL], "options": {"temperature": 0}, **fields}


def test_calls_and_thinking_come_apart_from_the_content():
    with speaker(thinker()) as own:
        whole = own.chat(**speaking())
        message = whole.message
        assert (message.content, message.thinking, whole.done_reason) == ("One moment.", "Hm.", "stop")
        assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
            ("look_up", {"word": "é, }"})
        ] * 2
        parts = list(own.chat(**speaking(), stream=True))
        assert "".join(p.message.content or "" for p in parts) == message.content
        assert "".join(p.message.thinking or "" for p in parts) == message.thinking
        assert [c for p in parts for c in p.message.tool_calls or ()] == list(message.tool_calls)
        assert all(len(p.message.tool_calls or ()) <= 1 for p in parts), "a call comes when it is whole"
        thought = own.generate(model="fake", prompt=SAID + "<eos>", options={"temperature": 0})
        assert thought.thinking == "Hm." and thought.response.startswith("One moment.")


def test_a_call_that_breaks_off_is_content_and_no_call():
    with speaker(thinker()) as own:
        cut = speaking(CALL, options={"temperature": 0, "num_predict": CALL.index(", }") + 1})
        whole = own.chat(**cut)
        assert whole.message.tool_calls is None and whole.done_reason == "length"
        assert whole.message.content == 'look_up({"word": "é'
        assert "".join(p.message.content or "" for p in own.chat(**cut, stream=True)) == whole.message.content


def test_choices_of_tools():
    with live(front=thinker()) as server:

        def ask(**fields) -> httpx.Response:
            return httpx.post(f"{server.url}/api/chat", json=speaking(CALL, stream=False, **fields))

        assert "tool_calls" not in ask(tool_choice="none").json()["message"]
        assert ask(tool_choice="none").json()["message"]["content"] == CALL
        assert ask(tool_choice={"type": "function", "function": {"name": "nothing"}}).status_code == 400


def test_thinking_is_switched_where_the_template_can():
    template = "{{ messages[-1].content }}{{ 'on' if enable_thinking else 'off' }}<eos>{# <think> #}"
    with speaker(thinker(template)) as own:

        def ask(**fields) -> str:
            messages = [{"role": "user", "content": "It is "}]
            return own.chat(model="fake", messages=messages, options={"temperature": 0}, **fields).message.content

        assert (ask(think=True), ask(think=False), ask()) == ("It is on", "It is off", "It is off")
        with pytest.raises(ollama.ResponseError, match="think"):
            ask(think="high")
    with speaker(thinker("{{ messages[-1].content }}{{ reasoning_effort }}<eos>")) as own:
        assert (
            own.chat(model="fake", messages=HELLO, think="low", options={"temperature": 0}).message.content
            == "hellolow"
        )
        assert (
            own.chat(model="fake", messages=HELLO, think=False, options={"temperature": 0}).message.content == "hello"
        )
    with speaker(thinker("{{ messages[-1].content }}<think>{# always #}")) as own:
        assert own.chat(model="fake", messages=HELLO, think=True, options=GREEDY).message.thinking


def test_tool_results_are_matched_by_name_or_id():
    template = (
        "{% for m in messages %}{{ m.role }}|{{ m.name }}|{{ m.tool_call_id }}|"
        "{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.arguments.word }};{% endfor %}{% endfor %}<eos>"
        "{# <tool_call> #}"
    )
    calls = [{"function": {"name": "look_up", "arguments": {"word": w}}} for w in "ab"]
    calls.append({"id": "mine", "function": {"name": "other", "arguments": {}}})
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": "mine"},
        {"role": "tool", "content": "2", "tool_name": "look_up"},
        {"role": "tool", "content": "3"},
    ]
    with live(front=thinker(template)) as server:
        body = {"model": "fake", "messages": messages, "stream": False, "options": {"temperature": 0}}
        reply = httpx.post(f"{server.url}/api/chat", json=body).json()["message"]["content"]
    assert reply == (
        "user|||assistant|||call00001=a;call00002=b;mine=;tool|other|mine|tool|look_up|call00001|tool|look_up|call00002|"
    )


def test_images_are_refused_by_their_place(server):
    messages = [*HELLO, {"role": "user", "content": "what?", "images": ["aGk="]}]
    answer = httpx.post(f"{server.url}/api/chat", json={"model": "fake", "messages": messages})
    assert answer.status_code == 400 and "messages.1.images" in answer.json()["error"]


def test_a_suffix_makes_the_model_fill_in_the_middle():
    known = tokenizer(*QWEN)
    filling = Front(EchoEngine(vocab_size=VOCAB + len(QWEN)), known, ChatTemplate("{{ messages[0].content }}"))
    with speaker(filling) as own:
        options = {"temperature": 0, "num_predict": 7, "ignore_eos": True}
        answer = own.generate(model="fake", prompt="be", suffix="af", options=options)
        assert (answer.response, answer.prompt_eval_count, answer.context) == ("beaf", 7, None)
        assert "insert" in own.show("fake").capabilities
        with pytest.raises(ollama.ResponseError, match="system"):
            own.generate(model="fake", prompt="be", suffix="af", system="S")


def test_a_format_works_with_a_conversation_truncated_before_rendering():
    """Whether the model thinks is asked of what is left of it."""
    old = [{"role": "user", "content": "x" * (1 << 20)}, {"role": "assistant", "content": "y" * (1 << 20)}] * 2
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}on{% endif %}{# <think> #}"
    messages = [*old, {"role": "user", "content": "{}<eos>"}]
    body = {"model": "fake", "messages": messages, "format": "json", "stream": False, "truncate": True}
    with live(front=thinker(template)) as server:
        answer = httpx.post(f"{server.url}/api/chat", json=body | {"options": GREEDY}, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncated"] == {"messages": 4} and answer.json()["message"]["content"] == "{}"
