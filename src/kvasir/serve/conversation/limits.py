"""Limits of a request: memory for its output, its key's tokens, and the candidates of its log-probabilities."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from starlette.requests import Request as HTTPRequest

from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.aborting import make_abortable
from kvasir.serve.hosting.serving import Serving
from kvasir.types import Request


async def charge(
    serving: Serving, requests: Sequence[Request], asked: HTTPRequest, *, whole: bool, names: Collection[str] = ()
) -> None:
    """Reserves memory for the choices of one HTTP request, counts its prompts against its key's limit, and lets it be
    aborted by `names`, which its client knows. whole: the choices are buffered until all are complete. Raises
    InvalidRequest, LimitExceeded."""
    asked.scope["state"]["reservation"].take(requests, whole)
    await serving.quotas.prompt(requests[0].tenant, sum(len(r.prompt_ids) for r in requests))
    make_abortable(asked, serving, requests, names)


def check_logprobs(serving: Serving, **asked: int | None) -> None:
    """Raises InvalidRequest for more candidates per token than the server allows."""
    most = serving.settings.max_logprobs
    for name, count in asked.items():
        if count is not None and count > most:
            raise InvalidRequest(f"{name} is {count}", f"at most {most}", param=name)
