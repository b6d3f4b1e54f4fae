"""OpenAI's Responses API: stored conversations, and output as items.

A request becomes a chat (request.py), which runs like any chat; its output is returned as items (output.py).
"""

from kvasir.serve.dialects.openai.responses.routes import router
from kvasir.serve.records.responses import Responses

__all__ = ["Responses", "router"]
