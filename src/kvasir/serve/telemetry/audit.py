"""The audit log: one line for each request that manages the server or tries to."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir.serve.auth.scopes import MANAGES, Managing
from kvasir.serve.http.asgi import Sent
from kvasir.serve.telemetry.access import identity
from kvasir.serve.telemetry.lines import LineLog
from kvasir.serve.telemetry.metrics import route_of

TARGETS = ("model", "name", "from", "source", "destination")  # fields of bodies that name the target of a change
LONGEST = 256  # characters of a value
MOST = 64 * 1024  # maximum bytes of a body that is parsed for a target


def set_outcome(connection: HTTPConnection, outcome: str) -> None:
    """Sets the outcome to log, for streams, whose status cannot express it."""
    connection.scope["state"]["outcome"] = outcome


class AuditLog:
    """ASGI middleware around everything that can refuse a request. An outcome is `done`, `refused` (4xx), `failed`
    (5xx), `broken off`, or the text that the route has set."""

    def __init__(self, app: ASGIApp, managing: Managing, log: LineLog):
        self.app = app
        self.managing = managing
        self.log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body, sent, failed = b"", Sent(send), False

        async def reading() -> Message:
            nonlocal body
            message = await receive()
            if len(body) <= MOST:
                body += message.get("body", b"")[: MOST + 1]
            return message

        try:
            await self.app(scope, reading, sent)
        except Exception:
            failed = True
            raise
        finally:
            state = scope.get("state", {})
            route = self.managing.route(scope) or (route_of(scope) if MANAGES in state else None)
            if route is not None:
                outcome = state.get("outcome") or ("failed" if failed else _outcome(sent))
                target = {**_short(scope.get("path_params", {})), **_target(body)}
                line = {"route": route, "target": target, "status": sent.status, "outcome": outcome[:LONGEST]}
                self.log.put({**identity(scope), **line})


def _outcome(sent: Sent) -> str:
    if sent.status is None or not sent.whole:
        return "broken off"
    status = sent.status
    return "done" if status < 400 else "refused" if status < 500 else "failed"


def _target(body: bytes) -> dict[str, str]:
    try:
        fields = msgspec.json.decode(body) if len(body) <= MOST else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return _short({name: fields[name] for name in TARGETS if name in fields}) if isinstance(fields, dict) else {}


def _short(values: dict[str, Any]) -> dict[str, str]:
    return {name: value[:LONGEST] for name, value in values.items() if isinstance(value, str)}
