"""OpenAI's Responses API: stored conversations, and output as items.

A request becomes a chat (request.py), which runs like any chat; its output is returned as items (output.py).
"""

from fastapi import APIRouter

from kvasir.serve.dialects.openai.responses import compact, routes
from kvasir.serve.records.responses import Responses

router = APIRouter()
router.routes += [*compact.router.routes, *routes.router.routes]

__all__ = ["Responses", "router"]
