"""Models in the format of the Messages API: GET /v1/models and /v1/models/{id} for a client that sends the header
anthropic-version.

https://platform.claude.com/docs/en/api/models-list
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request as HTTPRequest

from kvasir.errors import InvalidRequest
from kvasir.serve.dialects.anthropic.pages import DEFAULT_LIMIT, MAX_LIMIT, page_of
from kvasir.serve.hosting.catalogue import Card


def speaks(request: HTTPRequest) -> bool:
    return "anthropic-version" in request.headers


def model_page(cards: Sequence[Card], request: HTTPRequest) -> dict[str, Any]:
    """One page, selected by the query's limit, after_id and before_id. All models are active. Raises InvalidRequest."""
    query = request.query_params
    stages = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]
    shown = list(cards) if not stages or "active" in stages else []
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= MAX_LIMIT):
        raise InvalidRequest(f"limit is {limit[:20]!r}", f"expected an integer in [1, {MAX_LIMIT}]", param="limit")
    page, bounds = page_of(shown, lambda card: card.name, int(limit), query.get("after_id"), query.get("before_id"))
    return {"data": list(map(model_object, page)), **bounds}


def model_object(card: Card) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    }
