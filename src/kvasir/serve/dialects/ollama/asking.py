"""The common part of /api/generate and /api/chat: loads a model, or generates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.serve.conversation.event_ids import with_event_ids
from kvasir.serve.conversation.limits import charge
from kvasir.serve.dialects.ollama.answer import AnswerPart, Clock, OllamaJob, Shape, head
from kvasir.serve.dialects.ollama.loading import load_or_unload
from kvasir.serve.dialects.ollama.params import NAMES
from kvasir.serve.dialects.ollama.route import serving_named
from kvasir.serve.dialects.ollama.wire import Asking
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.responses import json_response
from kvasir.serve.http.wire import renamed

Maker = Callable[[Any, Serving, HTTPRequest, Clock], Awaitable[OllamaJob]]


async def answer(wire: Asking, request: HTTPRequest, shape: Shape, to_job: Maker | None) -> Response:
    """to_job: None for a request without a prompt, which loads or unloads the model."""
    clock = Clock()
    if to_job is None:
        return await load_or_unload(request, wire.model, wire.keep_alive, clock, shape)
    serving = await serving_named(request, wire.model, wire.keep_alive)
    clock.loaded()
    with renamed(NAMES):
        job = await to_job(wire, serving, request, clock)
    if wire.debug_render_only:
        text = await serving.front.decode(job.core.prompt_ids)
        shown = {**head(wire.model), **shape(AnswerPart()), "done": False}
        return json_response({**shown, "_debug_info": {"rendered_template": text}})
    [core], ids = with_event_ids(request, serving, [job.core], stream=wire.streams, lines=True)
    job = replace(job, core=core, ids=ids)
    await charge(serving, [core], request, whole=not wire.streams)
    return await job.respond(request, wire.streams)
