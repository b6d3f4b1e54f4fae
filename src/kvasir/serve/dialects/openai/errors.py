"""Errors in OpenAI's format."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from kvasir.serve.http.faults import Fault


def openai_error(fault: Fault, request_id: str | None = None) -> bytes:
    """The error object of the OpenAI API, as JSON."""
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(fault.status)
    kind = kind or ("invalid_request_error" if fault.status < 500 else "server_error")
    error = {"message": fault.message, "type": kind, "param": fault.param, "code": fault.code}
    if long := fault.too_long:
        about = f"This model's maximum context length is {long.context} tokens: {fault.message}"
        error["message"] = f"{about} [{fault.code}]"  # some clients look for the code in the text
    return msgspec.json.encode({"error": error})


def openai_response(fault: Fault) -> Response:
    return Response(openai_error(fault), fault.status, fault.headers, "application/json")
