"""/openapi.json as the server behaves: the error format of each dialect, and the key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvasir.serve.http.faults import is_llamacpp

_TEXT: dict[str, Any] = {"type": "string"}
_MAYBE: dict[str, Any] = {"type": ["string", "null"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*properties], "properties": properties}


# By the name of the component; `faults.response_of` says which dialect uses which.
_ERRORS: dict[str, dict[str, Any]] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE, code=_MAYBE)),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "OllamaError": _object(error=_TEXT),
    "LlamaCppError": _object(error=_object(code={"type": "integer"}, message=_TEXT, type=_TEXT, param=_MAYBE)),
}
_STATUSES = {
    "400": "The request cannot be served as asked; `param` names the field.",
    "401": "A key is needed.",
    "403": "The Host, the Origin, the service class or what the key's scopes leave out is not allowed.",
    "404": "There is no such model or route.",
    "408": "The deadline of the request passed before its answer was complete.",
    "413": "The body is too large.",
    "429": "The queue is full or the key is at a limit; Retry-After says when to come back.",
    "500": "The engine failed on this request.",
    "503": "The engine is not available.",
}


def schema_of(app: FastAPI) -> dict[str, Any]:
    """The schema, created once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schema["components"]["schemas"] |= _ERRORS
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"] |= {status: _response(text, path) for status, text in _STATUSES.items()}
        app.openapi_schema = schema
    return app.openapi_schema


def _response(text: str, path: str) -> dict[str, Any]:
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    error = "OllamaError" if path.startswith("/api/") else error
    error = "LlamaCppError" if is_llamacpp(path) else error
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    return {"description": text, "content": content}
