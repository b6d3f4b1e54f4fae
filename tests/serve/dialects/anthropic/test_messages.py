"""The Messages API by Anthropic's own client: the engine repeats its prompt, so a prompt says what the model says."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from kvasir.engine.front import Front
from kvasir.text.chat import ChatTemplate
from tests.later import anthropic, openai
from tests.serve.dialects.anthropic.messages_help import CALL, FIRST, RESULT, SAID, SPOKEN, TOOL, USE, body, front
from tests.serve.fakes import EchoEngine, byte_tokenizer
from tests.serve.running import live


@pytest.fixture(scope="module")
def speaking():
    """Answers with what its first message says."""
    with live(front=front()) as server:
        yield server


@pytest.fixture(scope="module")
def own(speaking):
    with anthropic.Anthropic(base_url=speaking.url, api_key="none", max_retries=0) as own:
        yield own


@pytest.fixture(scope="module")
def echo():
    """Answers with its prompt, which shows what the template was given."""
    with (
        live(front=front(SPOKEN)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as own,
    ):
        yield own


def shown(message) -> dict:
    """A message as JSON; its ids, which are drawn anew each time, are looked at and left out."""
    value = json.loads(message.to_json(exclude_unset=False))
    assert value.pop("id").startswith("msg_")
    for block in value["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    return value


# -- answers -------------------------------------------------------------------------------------------------


def test_a_message_has_thinking_text_and_calls(own):
    message = own.messages.create(**body())
    thinking, text, *calls = message.content
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message",
        "assistant",
        "fake",
        "tool_use",
    )
    assert (thinking.type, thinking.thinking) == ("thinking", "I need f.") and thinking.signature
    assert (text.type, text.text) == ("text", "One moment.")
    assert [(c.type, c.name, c.input) for c in calls] == [("tool_use", "f", {"a": "é, }"})] * 2
    assert len({c.id for c in calls}) == 2
    assert message._request_id
    usage = message.usage
    prompt = own.messages.count_tokens(model="fake", messages=body()["messages"]).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == prompt == len(f"{SAID}".encode()) + 1
    assert usage.output_tokens == prompt and usage.service_tier == "standard"
    assert 0 < usage.output_tokens_details.thinking_tokens < prompt


CASES = [
    {},
    {"max_tokens": 20},
    {"max_tokens": len(SAID[: SAID.index("}")].encode())},
    {"max_tokens": 0},
    {"tools": []},
    {"tool_choice": {"type": "none"}},
    {"thinking": {"type": "adaptive", "display": "omitted"}},
    {"stop_sequences": ["moment"]},
    {"reply": ""},
    {"extra": {"temperature": 1.0, "seed": 7}},
]


@pytest.mark.few(4)
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_a_stream_adds_up_to_the_whole(own, fields):
    whole = shown(own.messages.create(**body(**fields)))
    with own.messages.stream(**body(**fields)) as stream:
        kinds = [event.type for event in stream]
        final = shown(stream.get_final_message())
    for usage in (whole["usage"], final["usage"]):  # the second one found the first one's prompt
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    for value in (whole, final):
        for block in value["content"]:
            block.pop("parsed_output", None)
    assert final == whole
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole["content"])


async def test_the_async_client_reads_streams(speaking):
    async with anthropic.AsyncAnthropic(base_url=speaking.url, api_key="none", max_retries=0) as own:
        async with own.messages.stream(**body("Good morning.")) as stream:
            assert "".join([text async for text in stream.text_stream]) == "Good morning."
        events = [event async for event in await own.messages.create(**body("Hi"), stream=True)]
        assert (await own.messages.count_tokens(model="fake", messages=body("Hi")["messages"])).input_tokens == 3
        assert [model.id async for model in own.models.list()] == ["fake"]
        assert (await own.models.retrieve("fake")).max_input_tokens == 2048
    assert [e.type for e in events][:2] == ["message_start", "content_block_start"]
    assert events[0].message.content == [] and events[0].message.stop_reason is None


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"reply": "Done."}, "end_turn", None),
        ({"reply": "Done.", "max_tokens": 3}, "max_tokens", None),
        ({"reply": "Done.", "max_tokens": 0}, "max_tokens", None),
        ({"reply": "Done.", "stop_sequences": ["?", "on"]}, "stop_sequence", "on"),
        ({"reply": CALL}, "tool_use", None),
        ({"reply": CALL, "max_tokens": 60}, "max_tokens", None),
        ({"reply": CALL, "tools": []}, "end_turn", None),
    ],
)
def test_an_answer_states_why_it_ended(own, fields, reason, sequence):
    message = own.messages.create(**body(**fields))
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert reason in get_args(anthropic.types.StopReason)


def test_an_answer_ends_with_the_context():
    small = Front(EchoEngine(max_model_len=40), byte_tokenizer(), ChatTemplate(FIRST))
    with live(front=small) as server, anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as own:
        prompt = [{"role": "user", "content": "abcd" * 5}]
        message = own.messages.create(model="fake", max_tokens=16000, messages=prompt)
        assert message.stop_reason == "model_context_window_exceeded" and message.usage.output_tokens == 20
        assert own.messages.create(model="fake", max_tokens=20, messages=prompt).stop_reason == "max_tokens"
        with pytest.raises(anthropic.BadRequestError, match="40"):
            own.messages.create(model="fake", max_tokens=1, messages=[{"role": "user", "content": "x" * 40}])


def test_max_tokens_0_warms_the_cache(own):
    prompt = body("A prompt that nobody has sent before, of several blocks of the cache.", max_tokens=0)
    cold = own.messages.create(**prompt)
    assert cold.content == [] and cold.usage.output_tokens == cold.usage.cache_read_input_tokens == 0
    warm = own.messages.create(**{**prompt, "max_tokens": 5})
    assert warm.usage.cache_read_input_tokens > 0
    assert warm.usage.cache_read_input_tokens + warm.usage.input_tokens == cold.usage.input_tokens


def test_a_truncated_call_keeps_its_arguments_so_far(own):
    cut = SAID.index('é, }"') + len("é, ")
    call = own.messages.create(**body(max_tokens=len(SAID[:cut].encode()))).content[-1]
    assert (call.type, call.input) == ("tool_use", {})
    numbers = '<tool_call>\n{"name": "f", "arguments": {"a": 1e300, "b": [1000000000000000000'
    free = [{"name": "f", "input_schema": {"type": "object"}}]
    call = own.messages.create(**body(numbers, max_tokens=len(numbers), tools=free)).content[-1]
    assert call.type == "tool_use" and call.input == {"a": 1e300, "b": [10**18]}


def test_a_seed_gives_the_same_answer_again(own):
    free = {"extra": {"temperature": 1.0}}
    drawn = own.messages.create(**body("abcdefgh", max_tokens=8, **free))
    again = own.messages.create(**body("abcdefgh", max_tokens=8, extra={"temperature": 1.0, "seed": drawn.seed}))
    assert again.content == drawn.content


# -- prompts -------------------------------------------------------------------------------------------------


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def prompt_of(echo, **fields) -> str:
    """What the template made of a conversation: the answer repeats it."""
    asked = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields}
    size = echo.messages.count_tokens(**{k: v for k, v in asked.items() if k != "metadata"}).input_tokens
    [block] = echo.messages.create(**asked, max_tokens=size, extra_body={"temperature": 0.0}).content
    return block.text


def cleared(words: str) -> dict:
    """For the user's turn before it alone."""
    return {"role": "system", "content": words, "clear_at": "next_user_message"}


CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
ASKED = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [{"type": "text", "text": "so"}, USE]}]
HISTORY = '[user|?][assistant|so|toolu_1:f:{"a": "x"}]'


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "[user|hi][assistant|"),
        ({"system": "Be brief."}, "[system|Be brief.][user|hi][assistant|"),
        ({"system": [{"type": "text", "text": "A.", **CACHED}]}, "[system|A.][user|hi][assistant|"),
        (
            {"system": [{"type": "text", "text": "A."}, {"type": "text", "text": "B."}]},
            "[system|A.\nB.][user|hi][assistant|",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "[user|hi][assistant|"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            "[user|a\nb][assistant|",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "now b"}]},
            "[user|a][system|now b][assistant|",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, cleared("b"), {"role": "user", "content": "c"}]},
            "[user|a\nc][assistant|",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, cleared("b"), {"role": "assistant", "content": "c"}]},
            "[user|a][system|b][assistant|c",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is ("}]},
            "[user|a][assistant|The answer is (",
        ),
        (
            {"messages": [*ASKED, {"role": "user", "content": [{**RESULT, "content": "42"}]}]},
            HISTORY + "[tool|42|toolu_1:f][assistant|",
        ),
        (
            {"messages": [*ASKED, {"role": "user", "content": [
                {**RESULT, "content": [text("no"), text("way")], "is_error": True},
                {"type": "text", "text": "well?"}]}]},
            HISTORY + "[tool|Error: no\nway|toolu_1:f][user|well?][assistant|",
        ),
        ({"messages": [*ASKED, {"role": "user", "content": [RESULT]}]}, HISTORY + "[tool||toolu_1:f][assistant|"),
        (
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "of another server"},
                {"type": "text", "text": "so"}]}, {"role": "user", "content": "and?"}]},
            "[user|?][assistant|hm|so][user|and?][assistant|",
        ),
        ({"thinking": {"type": "disabled"}}, "[user|hi]<False>[assistant|"),
        ({"thinking": {"type": "adaptive"}}, "[user|hi]<True>[assistant|"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "[user|hi]<True>[assistant|"),
        ({"output_config": {"effort": "low"}}, "[user|hi]<True><low>[assistant|"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)  # fmt: skip
def test_conversations_as_the_template_is_given_them(echo, fields, prompt):
    assert prompt_of(echo, **fields) == prompt


def test_tools_are_shown_as_functions(echo):
    prompt = prompt_of(echo, tools=[TOOL | CACHED | {"type": "custom", "input_examples": [{"a": "1"}]}])
    [tool] = json.loads(prompt.removeprefix("[user|hi]").removesuffix("[assistant|"))
    schema = TOOL["input_schema"] | {"examples": [{"a": "1"}]}
    assert tool == {"type": "function", "function": {"name": "f", "description": "does it", "parameters": schema}}


def test_thinking_has_a_budget_or_is_none(own):
    def thought(**thinking) -> str:
        blocks = own.messages.create(**body("<think>one two three</think>ok", thinking=thinking)).content
        return "".join(block.thinking for block in blocks if block.type == "thinking")

    assert thought(type="adaptive") == "one two three" == thought(type="enabled", budget_tokens=100)
    assert thought(type="enabled", budget_tokens=7) == "one two"
    assert thought(type="disabled") == ""


def test_thinking_that_is_left_out_comes_back_to_the_model(own, echo):
    reported = own.messages.create(
        **body("<think>deep é</think>ok", thinking={"type": "adaptive", "display": "omitted"})
    )
    thinking, text = reported.content
    assert thinking.thinking == "" and text.text == "ok"
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": reported.content}]
    assert prompt_of(echo, messages=[*history, {"role": "user", "content": "!"}]) == (
        "[user|?][assistant|deep é|ok][user|!][assistant|"
    )
    changed = [{"type": "thinking", "thinking": "", "signature": thinking.signature + "?"}]
    history[1] = {"role": "assistant", "content": changed}
    with pytest.raises(anthropic.BadRequestError, match="signature"):
        prompt_of(echo, messages=[*history, {"role": "user", "content": "!"}])


def test_a_chat_has_the_same_text():
    """The conversation in the words of both dialects is one prompt, and has one answer."""
    question = [{"role": "user", "content": "hi"}]
    with live() as server:
        theirs = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        own = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
        chat = theirs.chat.completions.create(
            model="fake",
            messages=[{"role": "system", "content": "s"}, *question],
            max_tokens=50,
            seed=3,
            temperature=1.0,
        )
        message = own.messages.create(
            model="fake", system="s", messages=question, max_tokens=50, extra_body={"seed": 3, "temperature": 1.0}
        )
        theirs.close(), own.close()
    assert message.content[0].text == chat.choices[0].message.content
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
