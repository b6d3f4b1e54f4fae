"""Errors in llama.cpp's format."""

from __future__ import annotations

import re

import msgspec

from kvasir.serve.http.faults import Fault, token_count

_LLAMACPP = re.compile("/(completions?|infill|props|slots(/[^/]*)?|apply-template|embeddings?|lora-adapters)")

_LLAMACPP_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}


def llamacpp_error(fault: Fault, request_id: str | None = None) -> bytes:
    """https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md, with the field named in addition"""
    kind = _LLAMACPP_KINDS.get(fault.status) or ("invalid_request_error" if fault.status < 500 else "server_error")
    error = {"code": fault.status, "message": fault.message, "type": kind, "param": fault.param}
    if long := fault.too_long:
        exceeds = f"the request ({token_count(long)} tokens) exceeds the available context size ({long.context} tokens)"
        error |= {"message": f"{exceeds}: {fault.message}", "type": "exceed_context_size_error"}
        error |= {"n_prompt_tokens": long.tokens, "n_ctx": long.context}
    return msgspec.json.encode({"error": error})


def is_llamacpp(path: str) -> bool:
    """Whether a route belongs to llama.cpp's native API."""
    return _LLAMACPP.fullmatch(path) is not None
