"""The OpenAI dialect: one module per route, the request bodies in wire.py, the response objects in shapes.py."""

from kvasir.serve.dialects.openai import chat, completions, embeddings

ROUTERS = (chat.router, completions.router, embeddings.router)
