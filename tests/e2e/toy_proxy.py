"""A proxy in front of a server that computes prompts and one that continues them. It does what vLLM's example of such a
proxy does: it asks the first for one token, and passes its kv_transfer_params on to the second."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def toy_proxy(prefill: httpx.AsyncClient, decode: httpx.AsyncClient, ask: dict | None = None) -> Starlette:
    """ask: more fields for the server that computes prompts."""

    async def answer(request: Request) -> Response:
        body = await request.json()
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": {**ASKS, **(ask or {})}}
        first.pop("stream_options", None)
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        response = await prefill.post(request.url.path, json=first, timeout=300)
        if response.status_code != 200:
            return Response(response.content, response.status_code)
        if params := response.json().get("kv_transfer_params"):
            body["kv_transfer_params"] = params

        async def parts() -> AsyncIterator[bytes]:
            async with decode.stream("POST", request.url.path, json=body, timeout=300) as stream:
                async for part in stream.aiter_bytes():
                    yield part

        return StreamingResponse(parts())

    return Starlette(
        routes=[Route(f"/v1/{name}", answer, methods=["POST"]) for name in ("completions", "chat/completions")]
    )
