"""The loops of Anthropic's client that call tools. They ask the server to keep the conversation, and continue
without that if the error says that it cannot."""

from __future__ import annotations

import json

import pytest

from tests.later import anthropic
from tests.serve.dialects.anthropic.messages_help import CALL, TOOL, front
from tests.serve.running import live

# One call, then what the tool gave.
TEMPLATE = (
    "{% if messages[-1].role == 'tool' %}It gave {{ messages[-1].content }}.<eos>"
    "{% else %}{{ messages[0].content }}{% endif %}{# <think> <tool_call> #}"
)
ASK = {
    "model": "fake",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": CALL + "<eos>"}],
    "extra_body": {"temperature": 0.0},
}
GIVEN = "It gave done with é, }."


def f(a: str) -> str:
    """does it

    Args:
        a: what to do
    """
    return f"done with {a}"


async def async_f(a: str) -> str:
    """does it"""
    return f"done with {a}"


@pytest.fixture(scope="module")
def url():
    with live(front=front(TEMPLATE)) as server:
        yield server.url


@pytest.fixture
def own(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as own:
        yield own


@pytest.fixture
def tool():
    return anthropic.beta_tool(f)


def test_a_tool_runner_answers(own, tool):
    runner = own.beta.messages.tool_runner(**ASK, tools=[tool])
    assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]
    assert runner.until_done().content[-1].text == GIVEN


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_tool_runner_streams(own, tool, eagerly):
    runner = own.beta.messages.tool_runner(**ASK, tools=[tool], stream=True, run_tools_eagerly=eagerly)
    texts = ["".join(event.text for event in stream if event.type == "text") for stream in runner]
    assert texts[-1] == GIVEN


async def test_an_async_tool_runner_answers(url):
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as own:
        tool = anthropic.beta_async_tool(async_f, name="f")
        message = await own.beta.messages.tool_runner(**ASK, tools=[tool]).until_done()
    assert message.content[-1].text == GIVEN


def test_a_refused_thread_has_the_error_details_that_the_client_reads(own, tool):
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(anthropic.BadRequestError, match="whole conversation") as caught:
            own.beta.messages.create(**ASK, thread=thread)
        details = caught.value.body["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    thread = own.beta.messages.thread(**ASK, tools=[tool], unsupported_request_behavior="continue_unthreaded")
    assert thread.send().stop_reason == "tool_use"


def test_what_goes_beside_a_thread_is_refused_as_without(own, tool):
    with pytest.raises(anthropic.BadRequestError, match="container") as caught:
        own.beta.messages.tool_runner(**ASK, tools=[tool], container="c").until_done()
    assert "details" not in caught.value.body["error"]


# -- what clients read without looking whether it is there ---------------------------------------------------------


def test_nullable_fields_are_present(own):
    """The types of the JavaScript client say so; code written by them fails on what is missing."""
    asked = {**ASK, "tools": [TOOL], "messages": [{"role": "user", "content": f"Hi {CALL}<eos>"}]}
    kept = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    for edits, more in ((None, {}), ({"applied_edits": []}, kept)):
        whole = json.loads(own.beta.messages.with_raw_response.create(**asked, **more).text())
        stream = own.beta.messages.with_raw_response.create(**asked, **more, stream=True).text()
        reported = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
        started = [event["content_block"] for event in reported if event["type"] == "content_block_start"]
        for message in (whole, reported[0]["message"]):
            assert message["context_management"] == edits
            assert message["container"] is None and message["stop_details"] is None
        assert reported[-2]["delta"] == {
            "container": None,
            **{n: whole[n] for n in reported[-2]["delta"] if n != "container"},
        }
        assert reported[-2]["context_management"] == edits
        for text, call in (whole["content"], started):
            assert text["citations"] is None and call["caller"] == {"type": "direct"}
        again = [*asked["messages"], {"role": "assistant", "content": whole["content"]}]
        result = {"type": "tool_result", "tool_use_id": whole["content"][-1]["id"], "content": "é"}
        answer = own.messages.create(**{**asked, "messages": [*again, {"role": "user", "content": [result]}]})
        assert answer.content[0].text == "It gave é."
