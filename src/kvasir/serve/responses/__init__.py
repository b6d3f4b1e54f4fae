"""OpenAI's Responses API: conversations that are kept here, and answers as items.

A request becomes a chat (request.py), which is answered as any chat is; what it says is returned as items (output.py).
"""

from kvasir.serve.responses.kept import Responses
from kvasir.serve.responses.routes import router

__all__ = ["Responses", "router"]
