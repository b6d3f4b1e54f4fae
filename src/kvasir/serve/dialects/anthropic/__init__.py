"""The Messages API: bodies in wire.py, conversion to a chat in prompt.py, content blocks in blocks.py, routes in
messages.py and batches.py."""

from kvasir.serve.dialects.anthropic import batches, messages
from kvasir.serve.dialects.anthropic.errors import anthropic_error, speaks_anthropic
from kvasir.serve.http.dialect import TEXT, Dialect, object_schema

DIALECT = Dialect(
    "anthropic",
    (batches.router, messages.router),
    speaks_anthropic,
    anthropic_error,
    "AnthropicError",
    object_schema(type={"const": "error"}, error=object_schema(type=TEXT, message=TEXT)),
    limit_headers="anthropic",
)
