"""GET /kvasir/info and /kvasir/live: the page's data about the server and the current state of its engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir import __version__
from kvasir.engine.client import Fleet
from kvasir.errors import EngineDead
from kvasir.metrics import latest
from kvasir.serve.auth.keys import Key
from kvasir.serve.auth.scopes import may_manage
from kvasir.serve.hosting.catalogue import catalogue_of, loaded_as
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.responses import json_response
from kvasir.serve.page.tiles import tiles
from kvasir.serve.telemetry.reports import plain, summed
from kvasir.snapshot import AnswerState, BlockMap, Snapshot
from kvasir.statistics import FrontStats

router = APIRouter(tags=["server"])

ID_LENGTH = 8  # characters shown of a choice's id


@router.get("/kvasir/info")
async def info(request: HTTPRequest) -> Response:
    """`models`: all models and adapters that requests may name; `adapters`: which of them are adapters; `manages`:
    whether the client may unload them; `tiles`: the figures of the page. The other fields describe the model in
    ?model=, by default the first loaded model; `has_replicas`: whether GET /fleet shows its replicas."""
    cards = await catalogue_of(request).cards()
    facts: dict[str, Any] = {"name": "kvasir", "version": __version__, "models": [card.name for card in cards]}
    facts["adapters"] = [card.name for card in cards if card.parent]
    facts |= {"manages": may_manage(request), "tiles": tiles()}
    serving = await _shown(request)
    if serving is not None:
        model = serving.front.info
        facts["model"] = serving.names[0]
        facts["tasks"] = [task.value for task in model.tasks]
        facts["max_model_len"] = model.max_model_len
        facts["executor"] = model.executor
        facts["grade"] = model.grade
        facts |= {"parameters": model.num_parameters, "dtype": model.dtype, "device": model.device}
        template = serving.front.template
        facts["has_template"] = template is not None and bool(template.sources)
        facts["has_replicas"] = isinstance(serving.front.engine, Fleet)
    return json_response({**facts, "api": "/openapi.json"})


@router.get("/kvasir/live")
async def live(request: HTTPRequest) -> Response:
    """The engine's counters, its unfinished choices (with ids only for the client's own), its blocks and last steps, of
    the model in ?model=, by default of the first loaded model."""
    serving = await _shown(request)
    if serving is None:
        raise EngineDead("no model is loaded", "send a request to a model first")
    snapshot = await serving.lookout.look()
    key: Key | None = request.scope["state"].get("key")
    fronts = (report.fronts.get(serving.names[0]) for report in await request.app.state.reports())
    meter = reduce(summed, (front for front in fronts if front), plain(serving.front.meter))
    latency = {name: percentiles(values) for name, values in latest(FrontStats, meter)}
    content = to_json(snapshot, key.name if key else "")
    return json_response({**content, "latency": latency})


async def _shown(request: HTTPRequest) -> Serving | None:
    """The model to show; it is not loaded for that. Raises ModelNotFound."""
    return await loaded_as(catalogue_of(request), request.query_params.get("model"))


def percentiles(values: Sequence[float]) -> dict[str, float | int | None]:
    """Percentiles (nearest rank) of the last measurements, in their unit."""
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[-(-p * len(ordered) // 100) - 1] if ordered else None for p in (50, 95, 99)}
    return {**ranks, "count": len(ordered)}


def to_json(snapshot: Snapshot, tenant: str) -> dict[str, Any]:
    return {
        "now": snapshot.now,
        "stats": snapshot.stats,
        "answers": [_answer(a, own=a.tenant == tenant) for a in snapshot.answers],
        "groups": [_group(g) for g in snapshot.groups],
        "steps": [(s.step, 1000 * s.seconds, s.decode_rows, s.prefill_tokens) for s in snapshot.steps],
    }


def _answer(answer: AnswerState, own: bool) -> dict[str, Any]:
    return {
        "id": answer.id.rpartition("-")[2][:ID_LENGTH] if own else None,
        "index": answer.index,
        "class": answer.slo,
        "row": answer.row,
        "prompt": answer.prompt,
        "known": answer.known,
        "computed": answer.computed,
        "cached": answer.cached,
        "preemptions": answer.preemptions,
        "age": answer.age,
    }


def _group(group: BlockMap) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "bound": group.bound,
        "total": group.total,
        "per_cell": group.per_cell,
        "cells": group.runs,
    }
