"""The Ollama dialect: request bodies in wire.py and manage_wire.py, a module for the routes of a kind, answer.py how
answers are written."""

from kvasir.serve.ollama import blobs, chat, embed, generate, listing, manage

ROUTERS = (generate.router, chat.router, embed.router, listing.router, manage.router, blobs.router)
