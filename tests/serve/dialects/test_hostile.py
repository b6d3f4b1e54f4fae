"""Whatever a body says, the answer is one of the dialect's, never a 500, and nothing stays in the server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

from kvasir.serve.dialects.anthropic.batches import MessageBatchRequest
from kvasir.serve.dialects.anthropic.wire import CountRequest
from kvasir.serve.dialects.llamacpp.wire import EmbeddingRequest as LlamaEmbedding
from kvasir.serve.dialects.llamacpp.wire import InfillRequest, TemplateRequest
from kvasir.serve.dialects.ollama.wire import EmbeddingsRequest, EmbedRequest, Options
from kvasir.serve.dialects.openai.responses.wire import TokenCountRequest
from kvasir.serve.dialects.openai.wire import EmbeddingRequest
from kvasir.serve.dialects.tgi.wire import Parameters
from kvasir.serve.http.wire import Wire
from tests.serve.dialects.hostile import VALUES, anything, judge, knocking, try_bodies
from tests.serve.dialects.table import LENGTH, ROWS

TEXT = st.text(max_size=5)
USER = [{"role": "user", "content": "hi"}]
# Routes that generate nothing, or only with a model of a certain kind: their bodies.
OTHERS: dict[str, tuple[type[Wire], dict[str, Any]]] = {
    "/v1/embeddings": (EmbeddingRequest, {"input": "ab"}),
    "/v1/responses/input_tokens": (TokenCountRequest, {"input": "ab"}),
    "/v1/messages/count_tokens": (CountRequest, {"messages": USER}),
    "/v1/messages/batches": (MessageBatchRequest, {}),
    "/api/embed": (EmbedRequest, {"model": "fake", "input": "ab"}),
    "/api/embeddings": (EmbeddingsRequest, {"model": "fake", "prompt": "ab"}),
    "/infill": (InfillRequest, {"input_prefix": "a", "input_suffix": "b", "n_predict": 3}),
    "/apply-template": (TemplateRequest, {"messages": USER}),
    "/embedding": (LlamaEmbedding, {"content": "ab"}),
}
BODIES = OTHERS | {row.path: (row.wire, row.request("ab", **{LENGTH: 3})) for row in ROWS}

# -- conversations with odd parts --------------------------------------------------------------------------------------

ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "function"])
NAMES = ["name", "tool_calls", "function_call", "refusal", "images", "thinking", "tool_name", "reasoning_content"]
KINDS = ["text", "thinking", "tool_use", "tool_result", "image", "redacted_thinking", "\ud800"]
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        "text": TEXT | VALUES,
        "thinking": TEXT | VALUES,
        "signature": st.sampled_from(["", "carries.", "carries.!", "carries./w=="]) | VALUES,
        "id": st.just("a") | VALUES,
        "tool_use_id": st.just("a") | VALUES,
        "name": st.just("f") | VALUES,
        "input": st.dictionaries(TEXT, VALUES, max_size=2) | VALUES,
        "content": VALUES,
        "is_error": VALUES,
        "cache_control": VALUES,
    },
)
GOOD = st.sampled_from(
    [
        {"type": "text", "text": "x"},
        {"type": "thinking", "thinking": "", "signature": "carries./w=="},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"k": 1}},
        {"type": "tool_result", "tool_use_id": "a", "content": "r"},
    ]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES, "content": st.lists(GOOD | BLOCKS, max_size=3) | TEXT | VALUES},
        optional=dict.fromkeys(NAMES, VALUES),
    ),
    max_size=4,
)
ITEM_KINDS = [
    "message",
    "function_call",
    "function_call_output",
    "reasoning",
    "compaction",
    "item_reference",
    "mcp_call",
]
PART_KINDS = ["input_text", "output_text", "refusal", "reasoning_text", "x"]
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(PART_KINDS)}, optional=dict.fromkeys(["text", "refusal", "annotations"], VALUES)
    ),
    max_size=2,
)
ITEM_NAMES = [
    "role",
    "content",
    "id",
    "call_id",
    "name",
    "arguments",
    "output",
    "summary",
    "encrypted_content",
    "status",
]
ITEM_VALUES = VALUES | PARTS | st.sampled_from(["user", "assistant", "c1"])
ITEMS = st.lists(
    st.fixed_dictionaries({}, optional={"type": st.sampled_from(ITEM_KINDS), **dict.fromkeys(ITEM_NAMES, ITEM_VALUES)}),
    max_size=4,
)


def odd(kind: type, most: int) -> st.SearchStrategy[dict]:
    """Some fields of a body with anything in them."""
    names = sorted(field.alias or name for name, field in kind.model_fields.items())
    return st.dictionaries(st.sampled_from(names), VALUES, max_size=most)


# By the field that contains them: fields of the prompt, and of the separate object of parameters.
INNER = {
    "messages": MESSAGES,
    "input": ITEMS,
    "options": odd(Options, 3),
    "parameters": odd(Parameters, 3),
}


def nearly_good(wire: type[Wire], good: dict[str, Any]) -> st.SearchStrategy[dict]:
    """A good body, with odd values in some fields and odd parts in those that are objects or lists."""
    inner = {name: strategy for name, strategy in INNER.items() if name in good}
    parts = st.fixed_dictionaries({}, optional=inner)
    kept = {"options": good.get("options", {}), "parameters": good.get("parameters", {})}

    def body(parts: dict, fields: dict) -> dict:
        return {**good, **{name: {**kept[name], **v} if name in kept else v for name, v in parts.items()}, **fields}

    return st.builds(body, parts, odd(wire, 3))


@pytest.fixture(scope="module")
def http(server):
    with knocking(server) as http:
        yield http


@pytest.mark.few(8)
@pytest.mark.parametrize("path", BODIES)
def test_a_good_body_with_odd_parts(http, path):
    try_bodies(http, path, nearly_good(*BODIES[path]))


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize"])
def test_arbitrary_bodies(http, path):
    try_bodies(http, path, anything(), most=20)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=x"])
def test_a_body_of_another_content_type(http, kind):
    content = b'{"prompt": "ab"}'
    judge("/v1/completions", http.post("/v1/completions", content=content, headers={"Content-Type": kind}))
