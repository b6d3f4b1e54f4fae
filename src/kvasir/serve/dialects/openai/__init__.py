"""The OpenAI dialect: one module per route, the request bodies in wire.py, the response objects in shapes.py."""

from kvasir.serve.dialects.openai import (
    batches,
    chat,
    completions,
    embeddings,
    files,
    pooling,
    responses,
    scores,
    tokens,
)  # fmt: skip
from kvasir.serve.dialects.openai.errors import openai_error
from kvasir.serve.http.dialect import TEXT, TEXT_OR_NULL, Dialect, object_schema

_ROUTES = (chat, completions, embeddings, scores, pooling, responses, files, batches, tokens)
DIALECT = Dialect(
    "openai",
    tuple(routes.router for routes in _ROUTES),
    lambda scope: True,
    openai_error,
    "Error",
    object_schema(error=object_schema(message=TEXT, type=TEXT, param=TEXT_OR_NULL, code=TEXT_OR_NULL)),
)
