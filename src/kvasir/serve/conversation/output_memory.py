"""The memory that choices occupy until they are sent, bounded per request and in total.

Streamed output is sent as it is generated. A choice that is not streamed is buffered, and log-probabilities make it
large: each token has its candidates, as objects and as JSON. So each request reserves the maximum that its choices may
need before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from kvasir.errors import InvalidRequest, LimitExceeded
from kvasir.memory import host_memory
from kvasir.serve.http.held import Held
from kvasir.types import Request

# Bytes per item, measured by tests/serve/conversation/test_output_memory.py.
TOKEN = 96  # its id and its text
LOGPROB = 1024  # added per token if log-probabilities are requested
CANDIDATE = 512
SHARE = 8  # 1/SHARE of the host's memory is for all choices


def needed(request: Request, whole: bool) -> int:
    """Maximum bytes that the choices of a resolved request occupy here. whole: they are not streamed."""
    params = request.params
    prompt = len(request.prompt_ids) * _entry(params.prompt_logprobs)
    return prompt + (params.n * (params.max_tokens or 0) * (TOKEN + _entry(params.logprobs)) if whole else 0)


def _entry(candidates: int | None) -> int:
    return 0 if candidates is None else LOGPROB + candidates * CANDIDATE


class AnswerMemory:
    """The memory for choices of one server, used on one event loop. most: bytes; None: 1/SHARE of the memory that this
    process may use."""

    def __init__(self, most: int | None = None):
        self.most = host_memory()[0] // SHARE if most is None else most
        self.held = 0

    def check(self, requests: Sequence[Request], size: int) -> None:
        """Raises InvalidRequest if `size` bytes can never fit, LimitExceeded if they do not fit at present."""
        if size > self.most:
            raise _too_large(requests, size, self.most)
        if self.held + size > self.most:
            message = (
                f"responses in progress take {_mib(self.held)} of {_mib(self.most)}; this request may need {_mib(size)}"
            )
            raise LimitExceeded(message, "try again later, stream it, or lower max_tokens", 1.0)


def _too_large(requests: Sequence[Request], size: int, most: int) -> InvalidRequest:
    """The error for a request that can never fit; names the parameter that makes it large."""
    params, count = requests[0].params, len(requests)
    prompt = sum(len(request.prompt_ids) for request in requests)
    if params.prompt_logprobs is not None and 2 * prompt * _entry(params.prompt_logprobs) > size:
        param, what = "prompt_logprobs", f"{params.prompt_logprobs} prompt_logprobs of {prompt} prompt tokens"
    else:
        what = f"{params.n} choices of up to {params.max_tokens} tokens"
        what += f" to each of {count} prompts" if count > 1 else ""
        what += f" with {params.logprobs} log-probabilities each" if params.logprobs else ""
        param = "logprobs" if params.logprobs else "n" if params.n > 1 else "max_tokens"
    message = f"{what} may need {_mib(size)} of memory; the server has {_mib(most)} for responses"
    return InvalidRequest(message, "lower n, max_tokens or the log-probabilities, or stream the response", param=param)


def _mib(size: int) -> str:
    return f"{-(-size >> 20)} MiB" if size >= 1 << 20 else f"{size} bytes"


class Reservation(Held):
    """The bytes reserved by one HTTP request."""

    def __init__(self, memory: AnswerMemory):
        self._memory = memory
        self._size = 0

    def take(self, requests: Sequence[Request], whole: bool) -> None:
        """Reserves memory for the requests. Raises InvalidRequest, LimitExceeded."""
        size = sum(needed(request, whole) for request in requests)
        self._memory.check(requests, size)
        self._size += size
        self._memory.held += size

    def _release(self) -> None:
        self._memory.held -= self._size
        self._size = 0


class MemoryGuard:
    """ASGI middleware: gives each request a reservation and releases it after the response."""

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
