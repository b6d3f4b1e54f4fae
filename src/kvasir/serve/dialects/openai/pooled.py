"""What the routes of models without generated text share: inputs to requests, and results to responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HTTPRequest

from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.limits import charge
from kvasir.serve.conversation.lora_path import Path, fields_of_each
from kvasir.serve.conversation.scheduling import Scheduling, scheduling_fields
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.asgi import while_connected
from kvasir.serve.http.concurrent import all_of
from kvasir.serve.http.wire import prompt_list
from kvasir.types import Request, Task


async def requests_of(
    wire: Scheduling,
    given: Any,
    serving: Serving,
    request: HTTPRequest,
    task: Task,
    *,
    special: bool = True,
    before: str = "",
    lora_path: Path = None,
) -> list[Request]:
    """One request of the core per input. given: a checked `Prompts` value. special: whether texts get special tokens.
    before: put before each text. lora_path: see `fields_of_each`. Raises InvalidRequest."""
    front, inputs = serving.front, prompt_list(given)
    check_count(serving, len(inputs), "input")
    fields = scheduling_fields(wire, serving, request)
    texts = [before + one for one in inputs if isinstance(one, str)]
    encoded = iter(await front.encode_all(texts, add_special_tokens=special))
    ids = (next(encoded) if isinstance(one, str) else one for one in inputs)
    each = await fields_of_each(lora_path, wire.lora, fields, len(inputs), serving, request)
    return [front.resolve_pooled(one, task, **own) for one, own in zip(ids, each, strict=True)]


def check_count(serving: Serving, count: int, param: str) -> None:
    """Raises InvalidRequest for more inputs than a request may have, and for none."""
    most = serving.settings.max_embeddings
    if not 0 < count <= most:
        raise InvalidRequest(f"{count} inputs", f"at least one and at most {most}", param=param)


async def results_of(requests: Sequence[Request], serving: Serving, request: HTTPRequest) -> list[tuple[float, ...]]:
    """The results of requests, in order. Counts their prompts against the key's limits first."""
    await charge(serving, requests, request, whole=False)
    return await while_connected(request.receive, all_of(serving.front.embed, requests))


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raises InvalidRequest for a number of dimensions that an embedding of `size` does not have."""
    if dimensions is not None and not 1 <= dimensions <= size:
        message = f"dimensions is {dimensions}; this model gives {size}"
        raise InvalidRequest(message, f"expected at least 1 and at most {size}", param="dimensions")


def usage_of(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


def listed(kind: str, data: list[Any], tokens: int, serving: Serving, request: HTTPRequest) -> dict[str, Any]:
    """A response of vLLM's routes. kind: of its id."""
    return {
        "id": response_id(kind, request),
        "object": "list",
        "created": int(time.time()),
        "model": serving.names[0],
        "data": data,
        "usage": usage_of(tokens),
    }


def response_id(kind: str, request: HTTPRequest) -> str:
    return f"{kind}-{request.scope['state']['request_id']}"
