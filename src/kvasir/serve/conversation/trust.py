"""Whether text in a conversation may be control tokens."""

from __future__ import annotations

from starlette.requests import Request as HTTPRequest

from kvasir.serve.auth.scopes import needs_trust
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.wire import Wire


class Trust(Wire):
    """trust_special_tokens: text in the conversation that looks like a control token is one. Needs the scope
    special_tokens, unless the server allows it for all."""

    trust_special_tokens: bool | None = None


def trust_of(wire: Trust, serving: Serving, request: HTTPRequest) -> bool | None:
    """Whether texts of this conversation may be control tokens; None: the server's default. Raises ScopeNeeded."""
    if wire.trust_special_tokens and not serving.front.trust_special_tokens:
        needs_trust(request)
    return wire.trust_special_tokens
