"""Errors in Ollama's format."""

from __future__ import annotations

import msgspec

from kvasir.serve.http.faults import Fault, with_field


def ollama_error(fault: Fault, request_id: str | None = None) -> bytes:
    """https://docs.ollama.com/api/errors"""
    message = with_field(fault)
    if fault.too_long:
        message = f"the input length exceeds the context length: {message}"
    return msgspec.json.encode({"error": message})
