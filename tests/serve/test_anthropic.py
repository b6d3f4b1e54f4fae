"""The Messages API by Anthropic's own client: the engine repeats its prompt, so a prompt says what the model says."""

from __future__ import annotations

import json
import socket

import anthropic
import httpx
import openai
import pytest

from kvasir.engine.front import Front
from kvasir.serve.settings import ServeSettings
from kvasir.text.chat import ChatTemplate
from tests.serve.fakes import POISON, EchoEngine, byte_tokenizer
from tests.serve.running import assert_idle, client, live
from tests.serve.test_streams import post, running, wait_until

TOOL = {
    "name": "f",
    "description": "does it",
    "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é, }"}}\n</tool_call>'
SAID = f"<think>\nI need f.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"
FIRST = "{{ messages[0].content }}{# <think> <tool_call> #}"  # the prompt is what the first message says
SPOKEN = (
    "{% for m in messages %}[{{ m.role }}"
    "{% if m.reasoning_content %}|{{ m.reasoning_content }}{% endif %}|{{ m.content }}"
    "{% for c in m.tool_calls or () %}|{{ c.id }}:{{ c.function.name }}:{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}|{{ m.tool_call_id }}:{{ m.name }}{% endif %}]{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if enable_thinking is defined %}<{{ enable_thinking }}>{% endif %}"
    "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}{% if add_generation_prompt %}[assistant|{% endif %}"
)


def front(template: str = FIRST, **options) -> Front:
    return Front(EchoEngine(max_model_len=2048, num_blocks=1000), byte_tokenizer(), ChatTemplate(template), **options)


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


def body(said: str = SAID, *, extra: dict | None = None, **fields) -> dict:
    messages = [{"role": "user", "content": said + "<eos>"}]
    more = {"extra_body": {"temperature": 0.0, **(extra or {})}}
    return {"model": "fake", "max_tokens": 400, "messages": messages, "tools": [TOOL], **more, **fields}


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
    {"said": ""},
    {"extra": {"temperature": 1.0, "seed": 7}},
]


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
    assert [e.type for e in events][:2] == ["message_start", "content_block_start"]
    assert events[0].message.content == [] and events[0].message.stop_reason is None


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"said": "Done."}, "end_turn", None),
        ({"said": "Done.", "max_tokens": 3}, "max_tokens", None),
        ({"said": "Done.", "max_tokens": 0}, "max_tokens", None),
        ({"said": "Done.", "stop_sequences": ["?", "on"]}, "stop_sequence", "on"),
        ({"said": CALL}, "tool_use", None),
        ({"said": CALL, "max_tokens": 60}, "max_tokens", None),
        ({"said": CALL, "tools": []}, "end_turn", None),
    ],
)
def test_an_answer_says_why_it_ended(own, fields, reason, sequence):
    message = own.messages.create(**body(**fields))
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


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


def test_what_is_left_of_a_call_that_was_cut(own):
    cut = SAID.index('é, }"') + len("é, ")
    call = own.messages.create(**body(max_tokens=len(SAID[:cut].encode()))).content[-1]
    assert (call.type, call.input) == ("tool_use", {})
    numbers = '<tool_call>\n{"name": "f", "arguments": {"a": 1e999, "b": [1000000000000000000000000000000'
    free = [{"name": "f", "input_schema": {"type": "object"}}]
    call = own.messages.create(**body(numbers, max_tokens=len(numbers), tools=free)).content[-1]
    assert call.type == "tool_use" and call.input["b"] == [10**30]


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


CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
ASKED = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [{"type": "text", "text": "so"}, USE]}]
HISTORY = '[user|?][assistant|so|toolu_1:f:{"a": "x"}]'


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
    told = own.messages.create(**body("<think>deep é</think>ok", thinking={"type": "adaptive", "display": "omitted"}))
    thinking, text = told.content
    assert thinking.thinking == "" and text.text == "ok"
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": told.content}]
    assert prompt_of(echo, messages=[*history, {"role": "user", "content": "!"}]) == (
        "[user|?][assistant|deep é|ok][user|!][assistant|"
    )
    changed = [{"type": "thinking", "thinking": "", "signature": thinking.signature + "?"}]
    history[1] = {"role": "assistant", "content": changed}
    with pytest.raises(anthropic.BadRequestError, match="signature"):
        prompt_of(echo, messages=[*history, {"role": "user", "content": "!"}])


def test_a_chat_says_the_same():
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


# -- what is refused -----------------------------------------------------------------------------------------


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
USER = [{"role": "user", "content": "hi"}]


def with_block(block: dict, role: str = "user") -> dict:
    return {"messages": [*USER, {"role": role, "content": [block]}, *USER]}


REFUSED = [
    (with_block(IMAGE), r"messages\.1\.content\.0.*'image'"),
    (with_block({"type": "document", "source": {}}), "'document'"),
    (with_block({"type": "redacted_thinking", "data": "x"}, "assistant"), "'redacted_thinking'"),
    (with_block({"type": "server_tool_use"}, "assistant"), "'server_tool_use'"),
    (with_block(USE), r"messages\.1\.content\.0.*tool_use in a message of the user"),
    (with_block({**RESULT, "tool_use_id": "toolu_9"}), "'toolu_9'"),
    (with_block({**RESULT, "content": [IMAGE]}), r"messages\.1\.content\.0\.tool_result\.content\.0.*'image'"),
    (with_block({"type": "text"}), r"messages\.1\.content\.0\.text\.text"),
    (with_block({"type": "thinking", "thinking": "x"}, "assistant"), "signature"),
    (with_block({**USE, "input": "{}"}, "assistant"), "input"),
    ({"messages": [*USER, {"role": "assistant", "content": [USE]}]}, "cannot be gone on with"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\.0\.role"),
    ({"system": [IMAGE]}, r"system\.0.*'image'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\.0.*'web_search_20250305'"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    ({"tools": [TOOL, TOOL]}, "one name"),
    ({"tools": [TOOL | {"defer_loading": True}]}, r"tools\.0\.defer_loading|defer_loading"),
    ({"tools": [TOOL | {"allowed_callers": ["code_execution_20260120"]}]}, "allowed_callers"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "'g'"),
    ({"tool_choice": {"type": "any"}}, "no tools"),
    ({"tool_choice": {"type": "sometimes"}}, "tool_choice"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": -1.0}, "temperature"),
    ({"top_p": 2.0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, r"stop_sequences\.0"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"thinking": {"type": "between_tools"}}, "'between_tools'"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"thinking": {"type": "adaptive", "block_binding": {}}}, "block_binding"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "task_budget"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, r"not"),
    ({"output_config": {"effort": "endless"}}, r"output_config\.effort"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
    ({"diagnostics": {"previous_message_id": "msg_1"}}, "diagnostics"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"speed": "fast"}, "speed"),
    ({"fallbacks": [{"model": "x"}]}, "fallbacks"),
    ({"thread": {}}, "thread"),
    ({"max_tokens_to_sample": 5}, "max_tokens_to_sample"),
    ({"service_tier": "gold"}, "service_tier"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(own, fields, message):
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        own.messages.create(model="fake", max_tokens=5, messages=USER, extra_body=fields)
    assert caught.value.type == "invalid_request_error" and caught.value.request_id
    assert caught.value.body["request_id"] == caught.value.request_id


def test_what_means_nothing_here_is_accepted(own):
    message = own.messages.create(
        **body("ok"),
        metadata={"user_id": "somebody"},
        service_tier="auto",
        cache_control={"type": "ephemeral"},
        extra_headers={"anthropic-beta": "context-management-2025-06-27,interleaved-thinking-2025-05-14"},
        extra_query={"beta": "true"},
    )
    assert message.content[0].text == "ok"
    harmless = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": [],
        "speed": "standard",
        "output_config": {"effort": "max"},
    }
    assert own.messages.create(**body("ok", extra=harmless)).content[0].text == "ok"


def test_errors_are_of_the_clients_classes():
    settings = ServeSettings(port=0, api_keys=("a-secret-key",), max_body=100_000)
    with live(settings) as server:
        asked = {"model": "fake", "max_tokens": 5, "messages": USER}
        with anthropic.Anthropic(base_url=server.url, api_key="a-secret-key", max_retries=0) as own:
            assert own.messages.create(**asked).usage.output_tokens == 5
            with pytest.raises(anthropic.NotFoundError) as missing:
                own.messages.create(**asked | {"model": "claude"})
            assert missing.value.type == "not_found_error"
            with pytest.raises(anthropic.APIStatusError) as large:
                own.messages.create(**asked | {"messages": [{"role": "user", "content": "x" * 200_000}]})
            assert (large.value.status_code, large.value.type) == (413, "request_too_large")
        with anthropic.Anthropic(base_url=server.url, api_key="a-wrong-key", max_retries=0) as own:
            with pytest.raises(anthropic.AuthenticationError) as denied:
                own.messages.create(**asked)
            assert denied.value.type == "authentication_error"
            with pytest.raises(anthropic.AuthenticationError):
                own.messages.count_tokens(model="fake", messages=USER)


def test_an_error_of_the_engine_is_told_in_both_ways():
    poison = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": chr(POISON) + "x"}]}
    with live(front=front()) as server, anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as own:
        for stream in (False, True):
            with pytest.raises(anthropic.InternalServerError) as caught:
                list(own.messages.create(**poison, stream=stream))
            assert caught.value.type == "api_error" and "inside" not in str(caught.value)


# -- streams on the wire -------------------------------------------------------------------------------------


LONG = b'{"messages": [{"role": "user", "content": "ab"}], "max_tokens": 400, "stream": %s}'


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_leaves_leaves_nothing(stream):
    with live(step_seconds=0.01) as server:
        connection: socket.socket = post(server, "/v1/messages", LONG % stream)
        wait_until(lambda: running(server) == 1)
        if stream == b"true":
            assert b"200 OK" in connection.recv(1000)
        connection.close()
        server.ask(assert_idle(server.front))
        assert server.ask(server.front.stats()).aborted == 1


def test_pings_and_errors_are_events():
    with live(ServeSettings(port=0, ping=0.05), step_seconds=0.4) as server:
        fields = {"messages": USER, "max_tokens": 60, "stream": True, "deadline": 0.6}
        text = httpx.post(f"{server.url}/v1/messages", json=fields, timeout=20).text
    events = [part.split("\n") for part in text.strip().split("\n\n")]
    assert all(first == f"event: {json.loads(second[6:])['type']}" for first, second in events)
    kinds = [first.removeprefix("event: ") for first, _ in events]
    assert "ping" in kinds and kinds[-1] == "error" and "message_stop" not in kinds
    assert json.loads(events[-1][1][6:])["error"]["type"] == "timeout_error"


# -- models --------------------------------------------------------------------------------------------------


def test_models_are_listed_in_pages():
    with live(ServeSettings(port=0, model_names=tuple("abcde"))) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as own:
            page = own.models.list(limit=2)
            assert ([m.id for m in page.data], page.has_more, page.first_id, page.last_id) == (
                ["a", "b"],
                True,
                "a",
                "b",
            )
            assert [m.id for m in own.models.list(limit=2)] == list("abcde")
            before = own.models.list(before_id="d", limit=2)
            assert ([m.id for m in before.data], before.has_more) == (["b", "c"], True)
            assert own.models.list(lifecycle=["retired"]).data == []
            model = own.models.retrieve("c")
            assert (model.id, model.type, model.lifecycle, model.max_input_tokens) == ("c", "model", "active", 512)
            with pytest.raises(anthropic.NotFoundError):
                own.models.retrieve("z")
            for wrong in ({"after_id": "z"}, {"limit": 0}, {"limit": 1001}, {"after_id": "a", "before_id": "b"}):
                with pytest.raises(anthropic.BadRequestError):
                    own.models.list(**wrong)
        openai_list = httpx.get(f"{server.url}/v1/models").json()
        assert openai_list["object"] == "list" and len(openai_list["data"]) == 5


async def test_errors_take_the_shape_of_the_dialect():
    async with client() as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
            response = await http.post(path, content=b"{")
            assert response.status_code in (400, 404, 405) and response.json()["type"] == "error"
            assert response.headers["request-id"] == response.json()["request_id"]
