"""Paths that clients of other servers use for routes that have another name here."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

# OpenAI's routes without /v1, except those that are native routes of llama.cpp (/completions, /embeddings).
_WITHOUT_V1 = re.compile(r"/(?:chat/completions|models|responses|batches|files)(?=/|$)")


class Aliases:
    """Replaces the path of a request by that of the route. Before all other middlewares: keys, limits and logs concern
    the route."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _WITHOUT_V1.match(scope["path"]):
            raw = scope.get("raw_path")
            scope = {**scope, "path": "/v1" + scope["path"], **({"raw_path": b"/v1" + raw} if raw else {})}
        await self._app(scope, receive, send)
