"""The ids of tool calls."""

from __future__ import annotations

import secrets
import string

_LETTERS = string.ascii_letters + string.digits


def call_id(own: str | None, size: int, prefix: str = "call_") -> str:
    """The model's own id of a call, if it generated one that its template accepts, otherwise a new one. size: of ids
    that the template accepts, in characters; 0: any."""
    if own and (not size or (len(own) == size and own.isascii() and own.isalnum())):
        return own
    return "".join(secrets.choice(_LETTERS) for _ in range(size)) if size else f"{prefix}{secrets.token_hex(12)}"
