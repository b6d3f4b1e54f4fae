"""The Ollama dialect: request bodies in wire.py and manage_wire.py, one module for each kind of route, encoding of
responses in answer.py."""

from kvasir.serve.dialects.ollama import blobs, chat, embed, generate, listing, manage
from kvasir.serve.dialects.ollama.errors import ollama_error
from kvasir.serve.http.dialect import TEXT, Dialect, object_schema

DIALECT = Dialect(
    "ollama",
    (generate.router, chat.router, embed.router, listing.router, manage.router, blobs.router),
    lambda scope: scope["path"].startswith("/api/"),
    ollama_error,
    "OllamaError",
    object_schema(error=TEXT),
)
