"""The Messages API: what is refused, errors as the client sees them, streams on the wire, and pages of models."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import httpx
import pytest

from kvasir.serve.auth.keys import Key, KeyLimits
from kvasir.serve.settings import ServeSettings
from tests.later import anthropic
from tests.serve.dialects.anthropic.messages_help import CALL, RESULT, TOOL, USE, body, front
from tests.serve.fakes import POISON
from tests.serve.running import client, live


@pytest.fixture(scope="module")
def speaking():
    """Answers with what its first message says."""
    with live(front=front()) as server:
        yield server


@pytest.fixture(scope="module")
def own(speaking):
    with anthropic.Anthropic(base_url=speaking.url, api_key="none", max_retries=0) as own:
        yield own


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
    (with_block({"type": "text", "text": "x", "citations": [{}]}), r"messages\.1\.content\.0\.citations"),
    ({"system": [{"type": "text", "text": "x", "citations": [{}]}]}, r"system\.0\.citations"),
    (with_block({**USE, "toolset_name": "browser"}, "assistant"), "toolset_name"),
    (with_block({**RESULT, "toolset_name": "browser"}), "toolset_name"),
    (with_block(USE), r"messages\.1\.content\.0.*tool_use in a message of the user"),
    (with_block({**RESULT, "tool_use_id": "toolu_9"}), "'toolu_9'"),
    (with_block({**RESULT, "content": [IMAGE]}), r"messages\.1\.content\.0\.tool_result\.content\.0.*'image'"),
    (with_block({"type": "text"}), r"messages\.1\.content\.0\.text\.text"),
    (with_block({"type": "thinking", "thinking": "x"}, "assistant"), "signature"),
    (with_block({**USE, "input": "{}"}, "assistant"), "input"),
    ({"messages": [*USER, {"role": "assistant", "content": [USE]}]}, "cannot be continued"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\.0\.role"),
    ({"messages": [{**USER[0], "clear_at": "never"}]}, r"messages\.0\.clear_at.*only a system message"),
    ({"messages": [*USER, {"role": "system", "output_config": {"effort": "low"}}]}, r"messages\.1\.output_config"),
    ({"messages": [*USER, {"role": "system", "output_config": {}}]}, r"messages\.1\.content"),
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
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {"multipleOf": 2}}}}}, r"not"),
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
def test_an_unsupported_value_is_refused_by_name(own, fields, message):
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        own.messages.create(model="fake", max_tokens=5, messages=USER, extra_body=fields)
    assert caught.value.type == "invalid_request_error" and caught.value.request_id
    assert caught.value.body["request_id"] == caught.value.request_id


def test_fields_without_effect_are_accepted(own):
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


def test_limits_are_in_the_headers_of_this_api():
    key = Key("ann-secret", "ann", limits=KeyLimits(requests_per_minute=2, tokens_per_minute=100))
    with (
        live(ServeSettings(port=0, keys=(key,))) as server,
        anthropic.Anthropic(base_url=server.url, api_key=key.secret, max_retries=0) as own,
    ):
        asked = {"model": "fake", "max_tokens": 5, "messages": USER}
        own.messages.count_tokens(model="fake", messages=USER)
        headers = own.messages.with_raw_response.create(**asked).headers
        reported = {
            name.removeprefix("anthropic-ratelimit-"): value for name, value in headers.items() if "rate" in name
        }
        assert (reported["requests-limit"], reported["requests-remaining"], reported["tokens-limit"]) == (
            "2",
            "0",
            "100",
        )
        assert 0 < int(reported["tokens-remaining"]) < 100 and len(reported) == 6
        reset = datetime.fromisoformat(reported["requests-reset"])
        assert 0 < (reset - datetime.now(UTC)).total_seconds() < 62
        with pytest.raises(anthropic.RateLimitError) as caught:
            own.messages.create(**asked)
        refused = caught.value.response.headers
        assert 1 <= int(refused["retry-after"]) <= 30 and refused["request-id"] == caught.value.request_id
        assert refused["anthropic-ratelimit-requests-remaining"] == "0"
        again = httpx.post(f"{server.url}/v1/completions", json={}, headers={"Authorization": "Bearer ann-secret"})
        assert again.headers["x-ratelimit-remaining-requests"] == "0" and "anthropic" not in str(again.headers)


def test_an_error_of_the_engine_whole_and_streamed():
    poison = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": POISON}]}
    with live(front=front()) as server, anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as own:
        for stream in (False, True):
            with pytest.raises(anthropic.InternalServerError) as caught:
                list(own.messages.create(**poison, stream=stream))
            assert caught.value.type == "api_error" and "inside" not in str(caught.value)


# -- streams on the wire -------------------------------------------------------------------------------------


def test_the_events_of_a_stream_to_the_letter(speaking):
    fields = {
        "model": "fake",
        "max_tokens": 120,
        "temperature": 0.0,
        "stream": True,
        "tools": [TOOL],
        "messages": [{"role": "user", "content": f"<think>a</think>b{CALL}<eos>"}],
    }
    text = httpx.post(f"{speaking.url}/v1/messages", json=fields).text
    reported = [json.loads(part.split("\ndata: ")[1]) for part in text.strip().split("\n\n")]
    assert (
        reported[0]["message"].pop("id").startswith("msg_")
        and reported[0]["message"].pop("usage")["output_tokens"] == 1
    )
    kinds = [event.get("delta", {}).get("type") or event["type"] for event in reported]
    merged = [event for i, event in enumerate(reported) if i == 0 or kinds[i] != kinds[i - 1]]
    for event in merged:
        event.get("content_block", {}).pop("id", None)
        event.pop("usage", None)
        if event.get("delta", {}).get("type"):
            event["delta"] = event["delta"]["type"]
    nothing = {"container": None, "stop_details": None, "stop_sequence": None}
    head = {"type": "message", "role": "assistant", "model": "fake", "content": [], "context_management": None}
    call = {"type": "tool_use", "name": "f", "input": {}, "caller": {"type": "direct"}}
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    assert merged == [
        {"type": "message_start", "message": head | nothing | {"stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": thinking},
        {"type": "content_block_delta", "index": 0, "delta": "thinking_delta"},
        {"type": "content_block_delta", "index": 0, "delta": "signature_delta"},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "citations": None, "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": "text_delta"},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": call},
        {"type": "content_block_delta", "index": 2, "delta": "input_json_delta"},
        {"type": "content_block_stop", "index": 2},
        {"type": "message_delta", "context_management": None, "delta": nothing | {"stop_reason": "tool_use"}},
        {"type": "message_stop"},
    ]


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
            between = own.models.list(after_id="a", before_id="e", limit=2)
            assert ([m.id for m in between.data], between.has_more) == (["c", "d"], True)
            assert [m.id for m in between] == ["c", "d", "b"]  # the client continues towards the front
            assert own.models.list(after_id="c", before_id="b").data == []
            for wrong in ({"after_id": "z"}, {"limit": 0}, {"limit": 1001}, {"after_id": "a", "before_id": "z"}):
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
