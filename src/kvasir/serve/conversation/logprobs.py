"""Log-probabilities of tokens as JSON objects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvasir.engine.answer import TokenInfo

LOWEST = -9999.0  # JSON has no infinity


def chat_logprobs(infos: Sequence[TokenInfo], drafts: bool = False) -> dict[str, Any]:
    """The format of chats: one object per token with its text, bytes and best candidates. drafts: tokens that a drafter
    had proposed are marked as `drafted`."""
    content = [
        {
            "token": info.text,
            "logprob": finite(info.logprob),
            "bytes": _numbers(info.bytes),
            "top_logprobs": [
                {"token": c.text, "logprob": finite(c.logprob), "bytes": _numbers(c.bytes)} for c in info.top
            ],
            **({"drafted": True} if drafts and info.drafted else {}),
        }
        for info in infos
    ]
    return {"content": content, "refusal": None}


def finite(logprob: float | None) -> float:
    """The log-probability, or LOWEST if it is below that or missing."""
    return LOWEST if logprob is None else max(logprob, LOWEST)


@lru_cache(1 << 16)
def _numbers(data: bytes) -> tuple[int, ...]:
    """Cached: returns the same object for each occurrence of a token."""
    return tuple(data)
