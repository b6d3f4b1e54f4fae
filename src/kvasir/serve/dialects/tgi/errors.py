"""Errors in the format of Text Generation Inference."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from kvasir.serve.http.faults import Fault, token_count, with_field

PATHS = frozenset(("/generate", "/generate_stream", "/info"))
_KINDS = {429: "overloaded", 408: "incomplete_generation"}


def speaks_tgi(scope: Scope) -> bool:
    """POST / is TGI's as well; GET / is the page."""
    return scope["path"] in PATHS or (scope["path"] == "/" and scope.get("method") == "POST")


def tgi_error(fault: Fault, request_id: str | None = None) -> bytes:
    """Hugging Face's clients choose their exception by `error_type`."""
    message = with_field(fault)
    if long := fault.too_long:
        given = f"Given: {token_count(long)} `inputs` tokens"
        message = f"`inputs` must have less than {long.context} tokens. {given}: {message}"
    kind = _KINDS.get(fault.status) or ("validation" if fault.status < 500 else "generation")
    return msgspec.json.encode({"error": message, "error_type": kind})
