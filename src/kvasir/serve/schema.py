"""/openapi.json as the server behaves: the error format of each dialect, and the key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvasir.serve.dialects import DIALECTS
from kvasir.serve.http.wire import Wire
from kvasir.serve.meanings import meaning_of

_STATUSES = {
    400: "The request is invalid; `param` names the field.",
    401: "A key is required.",
    403: "The Host, the Origin or the service class is not allowed, or the key lacks a scope.",
    404: "There is no such model or route.",
    408: "The deadline of the request passed before the response was complete.",
    413: "The body is too large.",
    429: "The queue is full or the key is at a limit; Retry-After gives the time to wait.",
    500: "The engine failed on this request.",
    503: "The engine is not available.",
}


def schema_of(app: FastAPI) -> dict[str, Any]:
    """The schema, created once."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schema["components"]["schemas"] |= {dialect.error_name: dialect.error_schema for dialect in DIALECTS}
        _describe(schema["components"]["schemas"])
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"] |= _errors(path)
        app.openapi_schema = schema
    return app.openapi_schema


def _describe(schemas: dict[str, Any]) -> None:
    """Adds what each field means."""
    kinds = {kind.__name__: kind for kind in _subclasses(Wire)}
    kinds |= {f"{kind.__module__}.{kind.__name__}".replace(".", "__"): kind for kind in _subclasses(Wire)}
    for name, schema in schemas.items():
        kind = kinds.get(name)
        if kind is None:
            continue
        names = {field.alias or own: own for own, field in kind.model_fields.items()}
        for shown, about in schema.get("properties", {}).items():
            if text := meaning_of(kind, str(names.get(shown, shown))):
                about["description"] = text


def _subclasses(kind: type[Wire]) -> Iterator[type[Wire]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _errors(path: str) -> dict[str, Any]:
    """The error responses of a path, in the format and with the statuses of its dialect."""
    scope = {"type": "http", "path": path, "method": "POST", "headers": ()}
    dialect = next(dialect for dialect in DIALECTS if dialect.speaks(scope))
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{dialect.error_name}"}}}
    return {
        str(dialect.statuses.get(status, status)): {"description": text, "content": content}
        for status, text in _STATUSES.items()
    }
