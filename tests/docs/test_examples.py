"""The responses in docs/api.md are what the vendors' own types allow, every literal included."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.docs import blocks
from tests.later import Later, anthropic, openai

ollama = Later("ollama")
PAGE = Path("docs/api.md")
TYPES: dict[str, Any] = {
    "/v1/chat/completions": lambda: openai.types.chat.ChatCompletion,
    "/v1/completions": lambda: openai.types.Completion,
    "/v1/embeddings": lambda: openai.types.CreateEmbeddingResponse,
    "/v1/responses": lambda: openai.types.responses.Response,
    "/v1/messages": lambda: anthropic.types.Message,
    "/v1/messages/count_tokens": lambda: anthropic.types.MessageTokensCount,
    "/api/generate": lambda: ollama.GenerateResponse,
    "/api/chat": lambda: ollama.ChatResponse,
}


def exchanges() -> dict[str, Any]:
    """The response to each route that the page shows."""
    found, path = {}, None
    for block in blocks(PAGE):
        if block.language == "sh" and (called := re.search(r"http://[\w.:]+(/\S*)", block.code)):
            path = called[1]
        elif block.language == "json" and path:
            found[path], path = json.loads(block.code), None
    return found


@pytest.mark.parametrize("path", TYPES)
def test_a_shown_response_has_the_vendors_type(path):
    TypeAdapter(TYPES[path]()).validate_python(exchanges()[path])
