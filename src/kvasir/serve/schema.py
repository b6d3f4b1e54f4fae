"""/openapi.json as this server behaves: one shape for all errors, and the key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_STATUSES = {
    "400": "The request cannot be served as asked; `param` names the field.",
    "401": "A key is needed.",
    "403": "The Host, the Origin or the service class is not allowed.",
    "404": "There is no such model or route.",
    "408": "The deadline of the request passed before its answer was complete.",
    "413": "The body is too large.",
    "429": "The queue is full or the key is at a limit; Retry-After says when to come back.",
    "500": "The engine failed on this request.",
    "503": "The engine is not available.",
}


def schema_of(app: FastAPI) -> dict[str, Any]:
    """The schema, made once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schema["components"]["schemas"]["Error"] = _ERROR
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["responses"] |= {status: _response(text) for status, text in _STATUSES.items()}
        app.openapi_schema = schema
    return app.openapi_schema


def _response(text: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": text, "content": content}
