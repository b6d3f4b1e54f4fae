"""The memory that answers take here until they are sent whole: bounded for each request and for all together.

What is streamed leaves as it comes. A whole answer is held, and log-probabilities make it large: each token has its
candidates, as objects and as JSON. So a request reserves what its answers may need at most before it is begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.errors import InvalidRequest, LimitExceeded
from kvasir.memory import host_memory
from kvasir.types import Request

# Bytes, as tests/serve/test_answer_memory.py measures them.
TOKEN = 96  # its id and its text
LOGPROB = 1024  # what comes with it where log-probabilities are asked for
CANDIDATE = 512
SHARE = 8  # of the host's memory, one part for all answers


def needed(request: Request, whole: bool) -> int:
    """Bytes that the answers of a resolved request take here at most. whole: they are not streamed."""
    params = request.params
    prompt = len(request.prompt_ids) * _entry(params.prompt_logprobs)
    return prompt + (params.n * (params.max_tokens or 0) * (TOKEN + _entry(params.logprobs)) if whole else 0)


def _entry(candidates: int | None) -> int:
    return 0 if candidates is None else LOGPROB + candidates * CANDIDATE


class AnswerMemory:
    """All of one server, on one event loop. most: bytes; None: a share of what this process may use."""

    def __init__(self, most: int | None = None):
        self.most = host_memory()[0] // SHARE if most is None else most
        self.held = 0

    def check(self, requests: Sequence[Request], size: int) -> None:
        """Raises InvalidRequest for what never fits, LimitExceeded for what does not fit now."""
        if size > self.most:
            raise _too_large(requests, size, self.most)
        if self.held + size > self.most:
            message = (
                f"answers in the making take {_mib(self.held)} of {_mib(self.most)}; this one may need {_mib(size)}"
            )
            raise LimitExceeded(message, "try again later, stream it, or lower max_tokens", 1.0)


def _too_large(requests: Sequence[Request], size: int, most: int) -> InvalidRequest:
    """Names what makes it large."""
    params, count = requests[0].params, len(requests)
    prompt = sum(len(request.prompt_ids) for request in requests)
    if params.prompt_logprobs is not None and 2 * prompt * _entry(params.prompt_logprobs) > size:
        param, what = "prompt_logprobs", f"{params.prompt_logprobs} prompt_logprobs of {prompt} prompt tokens"
    else:
        what = f"{params.n} answers of up to {params.max_tokens} tokens"
        what += f" to each of {count} prompts" if count > 1 else ""
        what += f" with {params.logprobs} log-probabilities each" if params.logprobs else ""
        param = "logprobs" if params.logprobs else "n" if params.n > 1 else "max_tokens"
    message = f"{what} may need {_mib(size)} of memory; the server has {_mib(most)} for answers"
    return InvalidRequest(message, "lower n, max_tokens or the log-probabilities, or stream the answer", param=param)


def _mib(size: int) -> str:
    return f"{-(-size >> 20)} MiB" if size >= 1 << 20 else f"{size} bytes"


class Reservation:
    """What one HTTP request has reserved, until all who hold it have left."""

    def __init__(self, memory: AnswerMemory):
        self._memory = memory
        self._size = 0
        self._holders = 1

    def take(self, requests: Sequence[Request], whole: bool) -> None:
        """Raises InvalidRequest, LimitExceeded."""
        size = sum(needed(request, whole) for request in requests)
        self._memory.check(requests, size)
        self._size += size
        self._memory.held += size

    def hold(self, work: asyncio.Task) -> None:
        """Work that continues when the request is answered keeps it."""
        self._holders += 1
        work.add_done_callback(lambda _: self.leave())

    def leave(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._memory.held -= self._size
            self._size = 0


class MemoryGuard:
    """Gives each request a reservation, and takes it back when the request is answered."""

    def __init__(self, app: ASGIApp, memory: AnswerMemory):
        self.app = app
        self.memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        reservation = scope.setdefault("state", {})["reservation"] = Reservation(self.memory)
        try:
            await self.app(scope, receive, send)
        finally:
            reservation.leave()
