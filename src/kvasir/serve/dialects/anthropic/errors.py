"""Errors in Anthropic's format."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Scope

from kvasir.serve.http.faults import Fault, token_count, with_field

_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}  # fmt: skip


def anthropic_error(fault: Fault, request_id: str | None) -> bytes:
    """https://docs.anthropic.com/en/api/errors"""
    kind = _ANTHROPIC.get(fault.status) or ("invalid_request_error" if fault.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": with_field(fault)}
    if long := fault.too_long:
        error["message"] = f"prompt is too long: {token_count(long)} tokens > {long.context - 1} maximum ({long.hint})"
    if fault.details:
        error["details"] = fault.details
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request uses Anthropic's API."""
    return scope["path"].startswith("/v1/messages") or any(name == b"anthropic-version" for name, _ in scope["headers"])
