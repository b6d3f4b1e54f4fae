"""The Ollama dialect: request bodies in wire.py and manage_wire.py, one module for each kind of route, encoding of
responses in answer.py."""

from kvasir.serve.dialects.ollama import blobs, chat, embed, generate, listing, manage

ROUTERS = (generate.router, chat.router, embed.router, listing.router, manage.router, blobs.router)
