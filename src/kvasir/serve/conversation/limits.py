"""Limits of a request: memory for its output, its key's tokens, and the candidates of its log-probabilities."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from starlette.requests import Request as HTTPRequest

from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.aborting import make_abortable
from kvasir.serve.hosting.serving import Serving
from kvasir.types import ModelInfo, Request, Task

MAX_VALUES = 1 << 22  # numbers of tokens in a response


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


def check_values(info: ModelInfo, task: Task, requests: Sequence[Request], param: str = "input") -> None:
    """Raises InvalidRequest for results of tokens that would make a response too large."""
    size = {Task.TOKEN_EMBED: info.token_embedding_size, Task.TOKEN_CLASSIFY: max(1, len(info.labels))}.get(task, 0)
    values = size * sum(len(request.prompt_ids) for request in requests)
    if values > MAX_VALUES:
        raise InvalidRequest(f"{values} numbers in a response", f"at most {MAX_VALUES}; send fewer texts", param)
