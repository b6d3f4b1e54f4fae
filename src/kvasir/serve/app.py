"""create_app: the web application over a catalogue of models.

A request passes, from the outside in: metrics, request id, traces, access and audit logs, a catch-all for errors, the
bounds on connections and headers, Host and Origin, CORS, the drain gate, the key, its scopes, its limits, the bounds on
the body, and then a route. All of it is plain ASGI, so chunks of a stream reach the socket without buffering.
"""

from __future__ import annotations

import re
import secrets

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir import __version__
from kvasir.errors import KvasirError
from kvasir.serve import adapters, administration, fleet, meta, models
from kvasir.serve.auth.guards import HostGuard, KeyGuard
from kvasir.serve.auth.keyring import KeyRing
from kvasir.serve.auth.quota import QuotaGuard, Quotas
from kvasir.serve.auth.scopes import Managing, ScopeGuard
from kvasir.serve.conversation.aborting import OpenRequests
from kvasir.serve.conversation.output_memory import AnswerMemory, MemoryGuard
from kvasir.serve.dialects import DIALECTS
from kvasir.serve.dialects.openai import responses
from kvasir.serve.hosting.catalogue import Catalogue, Leases
from kvasir.serve.http.aliases import Aliases
from kvasir.serve.http.asgi import ClientGone, Sent, header
from kvasir.serve.http.connections import ConnectionGuard, Connections
from kvasir.serve.http.dialect import response_of
from kvasir.serve.http.drain import DrainGate, DrainGuard
from kvasir.serve.http.faults import current, fault_of
from kvasir.serve.http.limits import BodyLimit, HeaderLimit
from kvasir.serve.http.networks import networks
from kvasir.serve.http.shared_path import SharedPath
from kvasir.serve.page import live, static
from kvasir.serve.records import batches
from kvasir.serve.schema import schema_of
from kvasir.serve.settings import ServeSettings
from kvasir.serve.telemetry.access import AccessLog
from kvasir.serve.telemetry.audit import AuditLog
from kvasir.serve.telemetry.lines import LineLog
from kvasir.serve.telemetry.metrics import HttpMeter, Metered
from kvasir.serve.telemetry.otlp import SpanExporter
from kvasir.serve.telemetry.reports import WorkerReport
from kvasir.serve.telemetry.traces import Traced

_LOOPBACK_ORIGIN = r"https?://(([a-z0-9-]+\.)*localhost|127(\.\d+){3}|\[::1\])(:\d+)?"
OPEN_PATHS = frozenset(("/health", "/v1/health", "/ping", *static.FILES))
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_app(catalogue: Catalogue) -> FastAPI:
    """The application. The catalogue is started and stopped by the caller, on the same event loop."""
    app = FastAPI(title="Kvasir", version=__version__, docs_url=None, redoc_url=None)
    app.state.catalogue = catalogue
    app.state.http_meter = HttpMeter()
    app.state.reports = _no_reports  # of the other processes of this server
    app.state.drain_gate = DrainGate()
    app.state.open_requests = OpenRequests()
    app.state.abort = app.state.open_requests.abort
    app.state.answer_memory = AnswerMemory(catalogue.settings.answer_memory)
    settings = catalogue.settings
    proxies = networks(settings.trusted_proxies)
    app.state.connections = Connections(settings.max_connections, settings.max_connections_per_address, proxies)
    app.state.ring = KeyRing(settings.all_keys, catalogue.quotas.take, settings.keys_file, settings.plain_keys)
    app.state.http_meter.logs = open_logs(catalogue.settings)
    spans = app.state.http_meter.spans
    app.state.exporter = SpanExporter(settings.otlp_endpoint, outcomes=spans) if settings.otlp_endpoint else None
    app.state.responses = responses.Responses.of(catalogue.settings, app.state.ring.__len__)
    quotas, ring = catalogue.quotas, app.state.ring
    app.state.batches = batches.Batches(batches.Caller(app), settings, ring, quotas, catalogue.rows)
    app.state.dialects = DIALECTS
    of_dialects = (router for dialect in DIALECTS for router in dialect.routers)
    own = (models, adapters, administration, fleet, meta, live)
    routers = (*of_dialects, *(part.router for part in own))
    app.state.routes = [*(route for router in routers for route in router.routes)]
    app.state.routes += static.routes if settings.page else static.without_page
    app.router.routes += app.state.routes  # including the routers would build all routes again for each application
    for kind in (KvasirError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(ClientGone, _on_gone)
    _wrap(app, catalogue.settings, catalogue.quotas, Managing(app.state.routes))
    app.openapi = lambda: schema_of(app)  # type: ignore[method-assign]
    return app


async def _no_reports() -> list[WorkerReport]:
    return []


def _wrap(app: FastAPI, settings: ServeSettings, quotas: Quotas, managing: Managing) -> None:
    """Adds the middlewares, innermost first."""
    app.add_middleware(SharedPath)
    app.add_middleware(Leases)
    app.add_middleware(MemoryGuard, memory=app.state.answer_memory)
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body,
        max_seconds=settings.body_time,
        max_depth=settings.max_json_depth,
    )
    app.add_middleware(QuotaGuard, quotas=quotas)
    app.add_middleware(ScopeGuard, managing=managing)
    app.add_middleware(KeyGuard, ring=app.state.ring, open_paths=OPEN_PATHS)
    app.add_middleware(DrainGuard, gate=app.state.drain_gate)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_origin_regex=_LOOPBACK_ORIGIN,
        allow_methods=settings.cors_methods,
        allow_headers=settings.cors_headers,
        allow_credentials=settings.cors_credentials,
        max_age=settings.cors_max_age,
        expose_headers=("X-Request-Id", "Retry-After"),
    )
    allowed = (settings.allowed_hosts, settings.allowed_origins)
    app.add_middleware(HostGuard, host=settings.host, allowed_hosts=allowed[0], allowed_origins=allowed[1])
    app.add_middleware(HeaderLimit, max_bytes=settings.max_headers)
    app.add_middleware(ConnectionGuard, connections=app.state.connections, managing=managing)
    app.add_middleware(Net)
    if log := app.state.http_meter.logs.get("audit"):
        app.add_middleware(AuditLog, managing=managing, log=log)
    if log := app.state.http_meter.logs.get("access"):
        app.add_middleware(AccessLog, log=log)
    app.add_middleware(Traced, exporter=app.state.exporter, ratio=settings.otlp_ratio)
    app.add_middleware(RequestId)
    app.add_middleware(Metered, meter=app.state.http_meter)
    app.add_middleware(Aliases)


def open_logs(settings: ServeSettings) -> dict[str, LineLog]:
    """The configured logs by name. Raises ConfigError for a file that cannot be written."""
    audit = settings.audit_log or (settings.data_dir and settings.data_dir / "audit.jsonl")
    files = {"access": settings.access_log, "audit": audit}
    return {name: LineLog(file) for name, file in files.items() if file}


# Error handlers are coroutines: starlette runs each call of a plain function in a thread.
async def _on_error(request: Request, error: Exception) -> Response:
    return response_of(fault_of(error), request.scope)


async def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


class RequestId:
    """Gives every response an X-Request-Id: the client's own if it is well-formed, otherwise a new one. Anthropic's
    clients read it as request-id. Sets `state["request_id"]`."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = header(scope, b"x-request-id") or ""
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        both = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]

        async def tagging(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *both]
            await send(message)

        token = current.set(state)
        try:
            await self.app(scope, receive, tagging)
        finally:
            current.reset(token)


class Net:
    """Catches exceptions that no route and no handler caught: the client gets a 500 without internals, the log gets the
    details."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        sent = Sent(send)
        try:
            await self.app(scope, receive, sent)
        except Exception as error:
            fault = fault_of(error)
            if sent.status is not None:
                raise
            await response_of(fault, scope)(scope, receive, send)
