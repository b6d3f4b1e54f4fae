"""Requests without a prompt: they load or unload a model."""

from __future__ import annotations

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.errors import InvalidRequest
from kvasir.serve.auth.scopes import needs_management
from kvasir.serve.dialects.ollama.answer import AnswerPart, Clock, Shape, head
from kvasir.serve.dialects.ollama.route import full_name, serving_named
from kvasir.serve.hosting.catalogue import OneModel, catalogue_of
from kvasir.serve.http.responses import json_response


async def load_or_unload(
    request: HTTPRequest, model: str, keep_alive: float | None, clock: Clock, shape: Shape
) -> Response:
    """keep_alive 0 unloads: at once, or when the running requests have ended. That needs the scope management. Raises
    ModelNotFound, InvalidRequest, ScopeNeeded, EngineDead."""
    catalogue = catalogue_of(request)
    name = await full_name(catalogue, model)
    if keep_alive == 0:
        needs_management(request)
    if keep_alive == 0 and isinstance(catalogue, OneModel):
        raise InvalidRequest("this server's model stays loaded", "stop the server instead", "keep_alive")
    loaded = any(name in serving.names for serving in catalogue.loaded())
    if loaded or keep_alive != 0:  # a model is not loaded only to unload it
        await serving_named(request, name, keep_alive)
    clock.loaded()
    reason = "unload" if keep_alive == 0 else "load"
    answer = {**head(model), **shape(AnswerPart()), "done": True, "done_reason": reason, **clock.loading()}
    return json_response(answer)
