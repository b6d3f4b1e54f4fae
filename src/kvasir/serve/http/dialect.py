"""Dialect: a protocol that clients speak, as the server sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Scope

from kvasir.serve.http.faults import Fault


@dataclass(frozen=True, slots=True)
class Dialect:
    """name: the tag in /openapi.json. speaks: whether a request uses the dialect. error: encodes a fault as JSON, given
    the request id. error_name, error_schema: name and JSON schema of such an error in /openapi.json. statuses: our
    status codes -> those of the dialect. limit_headers: which names the headers with a key's limits have."""

    name: str
    routers: tuple[APIRouter, ...]
    speaks: Callable[[Scope], bool]
    error: Callable[[Fault, str | None], bytes]
    error_name: str
    error_schema: Mapping[str, Any]
    statuses: Mapping[int, int] = field(default_factory=dict)
    limit_headers: Literal["openai", "anthropic"] = "openai"


def dialect_of(scope: Scope) -> Dialect:
    """The first dialect of the application that the request speaks. The last one takes every request."""
    return next(dialect for dialect in scope["app"].state.dialects if dialect.speaks(scope))


def response_of(fault: Fault, scope: Scope) -> Response:
    """The fault in the format of the dialect that the request speaks."""
    dialect = dialect_of(scope)
    body = dialect.error(fault, scope.get("state", {}).get("request_id"))
    return Response(body, dialect.statuses.get(fault.status, fault.status), fault.headers, "application/json")


def object_schema(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object with these properties, all required."""
    return {"type": "object", "required": [*properties], "properties": properties}


TEXT: Mapping[str, Any] = {"type": "string"}
TEXT_OR_NULL: Mapping[str, Any] = {"type": ["string", "null"]}
