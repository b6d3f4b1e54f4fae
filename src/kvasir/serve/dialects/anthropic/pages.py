"""Pagination of lists, as in the API.

https://platform.claude.com/docs/en/api/beta-headers and .../models-list, .../listing-message-batches
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvasir.errors import InvalidRequest

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000
T = TypeVar("T")


def page_of(
    items: Sequence[T], id_of: Callable[[T], str], limit: int, after: str | None, before: str | None
) -> tuple[Sequence[T], dict[str, Any]]:
    """At most `limit` of the items after `after` and before `before`, and the page's metadata. The page holds the first
    of these items, or with `before` the last, since the client pages towards the front. Raises InvalidRequest."""
    ids = [id_of(item) for item in items]
    first = 0 if after is None else _place(ids, after, "after_id") + 1
    last = len(ids) if before is None else _place(ids, before, "before_id")
    start, end = (first, min(first + limit, last)) if before is None else (max(first, last - limit), last)
    more = start > first if before is not None else end < last
    shown = ids[start:end]
    ends = {"first_id": shown[0] if shown else None, "last_id": shown[-1] if shown else None}
    return items[start:end], {"has_more": more, **ends}


def _place(ids: Sequence[str], id: str, param: str) -> int:
    try:
        return ids.index(id)
    except ValueError:
        raise InvalidRequest(f"{param} names no entry: {id[:80]!r}", "give an id of the list", param=param) from None
