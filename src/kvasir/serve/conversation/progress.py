"""The progress of a prompt, in the format of llama.cpp's server."""

from __future__ import annotations

from typing import Any

from kvasir.engine.answer import TextDelta
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.event_ids import EventIds

FIELD = "return_progress"


def progress_object(delta: TextDelta) -> dict[str, Any]:
    """llama.cpp's `prompt_progress`: processed tokens include those that were cached."""
    assert delta.progress is not None
    return {
        "total": delta.usage.prompt_tokens,
        "cache": delta.usage.cached_tokens,
        "processed": delta.progress.tokens,
        "time_ms": round(1000 * delta.progress.seconds),
    }


def check_numbering(asked: bool | None, ids: EventIds | None) -> None:
    """Raises InvalidRequest for progress in a stream whose events have ids: no stream can be continued there."""
    if asked and ids is not None:
        raise InvalidRequest(f"{FIELD} in a stream with event ids", "leave one of them out", param=FIELD)
