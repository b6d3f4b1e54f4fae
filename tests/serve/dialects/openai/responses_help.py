"""What the tests of responses share: a model that thinks and calls, since it repeats what its prompt says."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter

from kvasir.engine.front import Front
from kvasir.serve.auth.keys import Key
from kvasir.serve.settings import ServeSettings
from kvasir.text.chat import ChatTemplate
from tests.later import openai
from tests.serve.fakes import EchoEngine, byte_tokenizer
from tests.serve.running import client

TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é, }"}}\n</tool_call>'
THOUGHT = "<think>\nI need f.\n</think>\n\n"
SAID = f"{THOUGHT}One moment.\n{CALL}\n{CALL}"
TEMPLATE = "{{ messages[-1].content }}{# <think> <tool_call> #}"


@cache
def event_type() -> TypeAdapter:
    return TypeAdapter(openai.types.responses.ResponseStreamEvent)


def thinker(**engine) -> Front:
    return Front(EchoEngine(**engine), byte_tokenizer(), ChatTemplate(TEMPLATE), trust_special_tokens=True)


@asynccontextmanager
async def keeping(folder: Path | None = None, keys: tuple[Key, ...] = (), front: Front | None = None, **settings):
    """A client of a server that keeps its responses in a folder, which the next server may use."""
    settings = ServeSettings(data_dir=folder, keys=keys, **settings)
    async with client(settings, front or thinker()) as http:
        yield http
        state = http.app.state  # type: ignore[attr-defined]
        for kept in (state.responses, state.batches):
            kept.close()


def body(reply: str = SAID, **fields) -> dict:
    """The answer repeats the prompt once."""
    return {"model": "fake", "input": reply + "<eos>", "temperature": 0, "max_output_tokens": 300, **fields}


async def create(http, **fields) -> dict:
    answer = await http.post("/v1/responses", json=fields)
    assert answer.status_code == 200, answer.text
    openai.types.responses.Response.model_validate(answer.json())
    return answer.json()


async def refused(http, method: str = "POST", path: str = "/v1/responses", status: int = 400, **fields) -> dict:
    answer = await http.request(method, path, json=fields or None)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def reported(text: str) -> list[dict]:
    """The events of a stream, each of which must be as the client's types say."""
    events = []
    for block in filter(None, text.split("\n\n")):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        event_type().validate_python(event)
        events.append(event)
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return events


def same(response: dict) -> dict:
    """A response without what differs between two that were asked the same: ids, times, and what was cached."""
    text = json.dumps({k: v for k, v in response.items() if k not in ("created_at", "completed_at", "background")})
    for item in (response, *response["output"]):
        text = text.replace(item["id"], item["id"].partition("_")[0])
    for item in response["output"]:
        text = text.replace(item["call_id"], "call") if "call_id" in item else text
    response = json.loads(text)
    response["usage"]["input_tokens_details"].pop("cached_tokens")
    return response


def built(events: list[dict]) -> list[dict]:
    """The output that the events tell of, put together from their deltas."""
    items: list[dict] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
                items.append(event["item"])
            case "content_part.added":
                assert items[-1]["id"] == event["item_id"]
                items[-1]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part.get("logprobs", []).extend(event.get("logprobs", []))
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                items[event["output_index"]]["input"] += event["delta"]
            case "custom_tool_call_input.done":
                assert items[-1]["input"] == event["input"]
            case "output_text.done" | "reasoning_text.done":
                assert items[-1]["content"][0]["text"] == event["text"]
            case "function_call_arguments.done":
                assert items[-1]["arguments"] == event["arguments"]
            case "content_part.done":
                assert items[-1]["content"][0] == event["part"]
            case "output_item.done":
                end = ("status", "encrypted_content")  # which come with the end alone
                was, done = ({k: v for k, v in item.items() if k not in end} for item in (items[-1], event["item"]))
                assert was == done
                items[-1] = event["item"]
    return items
