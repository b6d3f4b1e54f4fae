"""/generate belongs to two protocols: Text Generation Inference's, whose bodies have `inputs`, and SGLang's."""

from __future__ import annotations

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SHARED, SGLANG = "/generate", "/sglang/generate"
_OWN = frozenset(("text", "input_ids", "input_embeds", "sampling_params"))  # fields of SGLang's bodies


class SharedPath:
    """ASGI middleware: gives a request to /generate with a body of SGLang the path /sglang/generate. The body is in
    memory already: BodyLimit has read it."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != SHARED or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        first: list[Message] = [await receive()]
        if _is_sglang(first[0].get("body", b"")):
            scope = {**scope, "path": SGLANG, "raw_path": SGLANG.encode()}

        async def again() -> Message:
            return first.pop() if first else await receive()

        await self.app(scope, again, send)


def _is_sglang(body: bytes) -> bool:
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False  # the route says what is wrong
    return "inputs" not in fields and not _OWN.isdisjoint(fields)
