"""The response object: the parameters of the request, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvasir.serve.dialects.openai.params import served_tier
from kvasir.serve.dialects.openai.responses.wire import ResponseRequest
from kvasir.serve.http.faults import Fault
from kvasir.types import Request, Usage

# The fields of tools that a request may leave out.
_LEFT_OUT: Mapping[str, dict[str, Any]] = {
    "function": {"description": None, "parameters": None, "strict": False},
    "custom": {"description": None, "format": {"type": "text"}},
}


def response_object(wire: ResponseRequest, core: Request, model: str, created: int) -> dict[str, Any]:
    """A response that has begun. created: seconds since 1970."""
    params = core.params
    effort = wire.reasoning.effort if wire.reasoning else None
    asked = wire.model_dump(include={"tools", "tool_choice", "text"}, exclude_none=True, by_alias=True)
    format = asked.get("text", {}).get("format", {"type": "text"})
    return {
        "id": core.id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": bool(wire.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": wire.max_tool_calls,
        "metadata": wire.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "previous_response_id": wire.previous_response_id,
        "prompt_cache_key": wire.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": wire.safety_identifier,
        "service_tier": served_tier(wire.service_tier, core.slo),
        "store": wire.store is not False,
        "temperature": params.temperature,
        "text": {"format": format, "verbosity": "medium"},
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": [_LEFT_OUT[tool["type"]] | tool for tool in asked.get("tools", ())],
        "top_logprobs": wire.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": wire.truncation or "disabled",
        "usage": None,
        "user": wire.user,
        **({} if params.greedy else {"seed": params.seed}),
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """The usage in this API's format. Cache writes are not billed, so their count is 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_object(fault: Fault) -> dict[str, Any]:
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(fault.status, "server_error")
    return {"code": code, "message": fault.message}


def encoded(event: Mapping[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"
