"""What agents and editors send, whole: each of their requests is answered, in the shape that they read."""

from __future__ import annotations

import json

import httpx
import pytest

from kvasir.engine.front import Front
from kvasir.text.chat import ChatTemplate
from tests.serve.fakes import EchoEngine, byte_tokenizer
from tests.serve.running import live

CALL = '<tool_call>\n{"name": "Read", "arguments": {"path": "a.py"}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}<eos>"
# The answer is what the last message of the user says; all of the conversation is rendered, so that nothing is unread.
TEMPLATE = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% if asked %}{{ asked[-1].content if asked[-1].content is string else asked[-1].content[-1].text }}{% endif %}"
    "{% for m in messages %}{% for c in m.tool_calls or () %}{% set _ = c.function.arguments.items() %}{% endfor %}"
    "{% endfor %}{% if enable_thinking %}{% endif %}{# <think> <tool_call> #}"
)
PARAMETERS = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"path": {"description": "Where it is", "type": "string"}, "limit": {"type": "number"}},
    "required": ["path"],
    "additionalProperties": False,
}
ABOUT = {"name": "Read", "description": "Reads a file."}
FUNCTION = {"type": "function", "function": {**ABOUT, "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def http():
    engine = EchoEngine(max_model_len=4096, num_blocks=2000)
    front = Front(engine, byte_tokenizer(), ChatTemplate(TEMPLATE), trust_special_tokens=True)
    with live(front=front) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def post(http, path: str, body: dict, headers: dict | None = None) -> httpx.Response:
    """Where they leave the temperature to the server, or want one, the engine would not repeat from the beginning."""
    if path.startswith("/v1/") and "count" not in path:
        body = {**body, "temperature": 0}
    answer = http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer: httpx.Response) -> list[dict]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# -- Claude Code ---------------------------------------------------------------------------------------------

EPHEMERAL = {"type": "ephemeral"}
CLAUDE_CODE = {
    "model": "fake",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {**EPHEMERAL, "scope": "global", "ttl": "1h"}},
        {"type": "text", "text": "# Environment", "cache_control": EPHEMERAL},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nA note.\n</system-reminder>"},
                {"type": "text", "text": "Look at a.py."},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "of an earlier answer"},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "b.py"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {}, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x = 1"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "<tool_use_error>path is missing</tool_use_error>"}],
                    "is_error": True,
                },
                {"type": "text", "text": SAID, "cache_control": EPHEMERAL},
            ],
        },
    ],
    "tools": [
        {**ABOUT, "input_schema": PARAMETERS, "eager_input_streaming": True},
        {
            "name": "TodoWrite",
            "description": "Keeps a list.",
            "input_schema": {**PARAMETERS, "properties": {}, "required": []},
            "cache_control": EPHEMERAL,
        },
    ],
    "tool_choice": {"type": "auto"},
    "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "s" * 36})},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
}
BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24"
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": BETAS,
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-retry-count": "0",
    "authorization": "Bearer none",
    "user-agent": "claude-cli/2.1.0 (external, cli)",
}


def test_claude_code(http):
    reported = events(post(http, "/v1/messages?beta=true", CLAUDE_CODE, CLAUDE_HEADERS))
    assert [event["type"] for event in reported if event["type"].startswith("message")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    blocks = [event["content_block"]["type"] for event in reported if event["type"] == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    assert reported[-2]["delta"]["stop_reason"] == "tool_use" and reported[-2]["usage"]["output_tokens"] > 0
    counted = {name: CLAUDE_CODE[name] for name in ("model", "messages", "system", "tools", "thinking")}
    tokens = post(http, "/v1/messages/count_tokens?beta=true", counted, CLAUDE_HEADERS).json()["input_tokens"]
    usage = reported[0]["message"]["usage"]
    assert tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_claude_code_asks_small_things_too(http):
    for fields in (
        {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}], "metadata": {"user_id": "u"}},
        {
            "max_tokens": 64,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "A title for this"}]}],
            "system": [{"type": "text", "text": "Write a title."}],
            "tools": [],
            "thinking": {"type": "disabled"},
            "temperature": 1,
            "output_config": {
                "format": {
                    "type": "json_schema",
                    "schema": {
                        "type": "object",
                        "properties": {"title": {"type": "string", "maxLength": 5}},
                        "required": ["title"],
                        "additionalProperties": False,
                    },
                }
            },
        },
    ):
        message = post(http, "/v1/messages?beta=true", {"model": "fake", **fields}, CLAUDE_HEADERS).json()
    assert set(json.loads(message["content"][-1]["text"])) == {"title"}


# -- Codex ---------------------------------------------------------------------------------------------------

CODEX = {
    "model": "fake",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>read-only</permissions>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a.py"}'},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": SAID}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {"type": "function", **ABOUT, "strict": False, "parameters": PARAMETERS},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81a0-7800-8aa0-bbab2a035a53",
}


def test_codex(http):
    headers = {"originator": "codex_cli_rs", "session_id": "0199a213", "openai-beta": "responses=experimental"}
    reported = events(post(http, "/v1/responses", CODEX, headers))
    assert reported[0]["type"] == "response.created" and reported[-1]["type"] == "response.completed"
    done = [event["item"] for event in reported if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert json.loads(done[-1]["arguments"]) == {"path": "a.py"} and done[0]["encrypted_content"]
    again = {**CODEX, "input": [*CODEX["input"], *done, {
        "type": "function_call_output", "call_id": done[-1]["call_id"], "output": "x = 1",
    }]}  # fmt: skip
    assert events(post(http, "/v1/responses", again, headers))[-1]["type"] == "response.completed"


# -- clients of the chat API ---------------------------------------------------------------------------------

HISTORY = [
    {"role": "developer", "content": "You are an agent."},
    {"role": "user", "content": [{"type": "text", "text": "Look."}]},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "function_call": None,
        "annotations": [],
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "List", "arguments": ""}},
            {"index": 1, "id": "call_2", "type": "function", "function": {"name": "Read", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
    {"role": "tool", "tool_call_id": "call_2", "name": "Read", "content": [{"type": "text", "text": "x = 1"}]},
    {"role": "assistant", "content": "", "tool_calls": []},
    {"role": "user", "content": SAID},
]
NOTHING = dict.fromkeys(
    (
        *("stop", "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs", "logit_bias", "seed", "user"),
        *("response_format", "tools", "tool_choice", "parallel_tool_calls", "stream_options", "metadata", "store"),
        *("frequency_penalty", "presence_penalty", "reasoning_effort", "service_tier", "functions", "function_call"),
        *("temperature", "top_p", "modalities", "prediction", "audio", "verbosity", "safety_identifier"),
    )
)


def test_a_stream_as_cline_and_others_read_it(http):
    body = {
        "model": "fake",
        "messages": HISTORY,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [FUNCTION],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning_effort": "medium",
        "max_completion_tokens": 300,
        "max_tokens": 200,
    }
    reported = events(post(http, "/v1/chat/completions", body))
    *chunks, last = reported
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and all("role" not in delta for delta in deltas[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [
        "tool_calls"
    ]
    assert chunks[-1]["choices"][0] | {"seed": 0, "stop_reason": 0} == chunks[-1]["choices"][0] | {
        "delta": {}, "finish_reason": "tool_calls", "seed": 0, "stop_reason": 0,
    }  # fmt: skip
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert {call["index"] for call in calls} == {0} and [bool(call.get("id")) for call in calls].count(True) == 1
    assert calls[0]["function"]["name"] == "Read" and calls[0]["type"] == "function"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"path": "a.py"}
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me look."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."


def test_null_is_as_good_as_nothing(http):
    plain = {"model": "fake", "messages": [{"role": "user", "content": SAID}]}
    [bare, nulls] = [
        post(http, "/v1/chat/completions", {**body, "temperature": 0}).json() for body in (plain, {**NOTHING, **plain})
    ]
    assert bare["choices"] == nulls["choices"] and bare["usage"]["total_tokens"] == nulls["usage"]["total_tokens"]


@pytest.mark.parametrize("n", [1, 2])
def test_answers_and_logprobs_beside_tools(http, n):
    body = {"model": "fake", "messages": HISTORY, "temperature": 0, "tools": [FUNCTION], "n": n, "logprobs": True}
    whole = post(http, "/v1/chat/completions", body).json()
    reported = events(post(http, "/v1/chat/completions", {**body, "stream": True}))
    for index, choice in enumerate(whole["choices"]):
        assert choice["index"] == index and choice["finish_reason"] == "tool_calls"
        own = [chunk["choices"][0] for chunk in reported if chunk["choices"][0]["index"] == index]
        tokens = [token for part in own if part["logprobs"] for token in part["logprobs"]["content"]]
        assert tokens == choice["logprobs"]["content"] and len(tokens) == whole["usage"]["completion_tokens"] // n


# -- clients of Ollama ---------------------------------------------------------------------------------------

ARGUMENTS = {"path": "b.py"}
OLLAMA_HISTORY = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": "Look.", "images": None},
    {"role": "assistant", "content": "", "thinking": None, "tool_calls": [
        {"id": "call_1", "function": {"index": 0, "name": "Read", "arguments": ARGUMENTS}}]},
    {"role": "tool", "tool_name": "Read", "content": "x = 1"},
    {"role": "user", "content": SAID},
]  # fmt: skip
OLLAMA = {
    "Open WebUI": {
        "messages": OLLAMA_HISTORY,
        "options": {"temperature": 0.0, "num_ctx": 4096, "repeat_last_n": 64, "tfs_z": 1.0, "num_gpu": 99, "stop": []},
        "keep_alive": "5m",
        "stream": True,
        "format": None,
        "template": ...,
    },
    "Continue": {
        "messages": [{"role": "user", "content": SAID}],
        "options": {
            **{"temperature": 0, "top_p": None, "top_k": None, "num_predict": 300, "stop": ["</done>"]},
            **{"num_ctx": 4096, "mirostat": None, "num_thread": 8, "use_mmap": None, "min_p": None, "num_gpu": None},
        },
        "keep_alive": 1800,
        "stream": True,
        "tools": [FUNCTION],
        "raw": ...,
    },
    "Zed": {
        "messages": OLLAMA_HISTORY,
        "stream": True,
        "keep_alive": -1,
        "options": {"num_ctx": 4096, "num_predict": None, "stop": [], "temperature": 0.0, "top_p": None},
        "think": True,
        "tools": [FUNCTION],
    },
    "Home Assistant": {
        "messages": OLLAMA_HISTORY,
        "stream": True,
        "think": False,
        "keep_alive": "-1s",
        "options": {"num_ctx": 4096, "temperature": 0},
        "tools": [{"type": "function", "function": {**ABOUT, "parameters": PARAMETERS, "strict": None}}],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OLLAMA)
def test_clients_of_ollama(http, name):
    body = {key: value for key, value in OLLAMA[name].items() if value is not ...}
    answer = post(http, "/api/chat", {"model": "fake:latest", **body})
    assert answer.headers["content-type"] == "application/x-ndjson"
    *parts, last = map(json.loads, answer.text.splitlines())
    assert last["done"] and last["done_reason"] == "stop" and last["eval_count"] > 0
    assert all(not part["done"] and part["message"]["role"] == "assistant" for part in parts)
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == ([{"path": "a.py"}] if "tools" in body else [])


def test_what_editors_look_up_before(http):
    """VS Code asks for a version and for what a model can; Continue names it as older servers had it."""
    version = http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    [model] = http.get("/api/tags").json()["models"]
    for body in ({"model": model["name"]}, {"name": model["name"]}, {"model": model["model"], "verbose": False}):
        shown = post(http, "/api/show", body).json()
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == 4096
        assert {"completion", "tools", "thinking"} <= set(shown["capabilities"]) and shown["details"][
            "family"
        ] == family
    assert http.get("/api/ps").json()["models"][0]["name"] == model["name"]
    assert http.get("/").status_code == http.head("/").status_code == 200


def test_completions_of_editors(http):
    """Continue's completion of a line, and llama.vim's, for a model without tokens for filling in the middle."""
    body = {"model": "fake", "prompt": "def f(", "raw": True, "options": {"num_predict": 4, "stop": ["\n\n"]}}
    lines = post(http, "/api/generate", {**body, "keep_alive": 1800, "suffix": ""}).text.splitlines()
    assert json.loads(lines[-1])["done"]
    asked = {
        **{"id_slot": 0, "input_prefix": "a\n", "input_suffix": "\nb", "input_extra": [], "prompt": "def f("},
        **{"n_predict": 8, "stop": [], "n_indent": 0, "top_k": 40, "top_p": 0.9, "stream": False, "cache_prompt": True},
        **{"samplers": ["top_k", "top_p", "infill"], "t_max_prompt_ms": 500, "t_max_predict_ms": 1000},
        "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
    }
    answer = http.post("/infill", json=asked)
    assert answer.status_code == 400 and "fill" in answer.json()["error"]["message"]
