"""GET /kvasir/info and /kvasir/live: what the page tells of the server, and of its engine at this moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir import __version__
from kvasir.engine.front import Front
from kvasir.errors import EngineDead
from kvasir.serve.keys import Key
from kvasir.serve.serving import json_response, serving_of
from kvasir.snapshot import AnswerState, BlockMap, Snapshot

router = APIRouter(tags=["server"])

FRESH = 0.25  # seconds for which a snapshot is shown to all who ask
ENGINE_SECONDS = 10.0  # for which one is waited for: an engine answers between its steps
ID_LENGTH = 8  # of an answer's id that is shown


@router.get("/kvasir/info")
async def info(request: HTTPRequest) -> Response:
    serving = serving_of(request)
    model = serving.front.info
    return json_response(
        {
            "name": "kvasir",
            "version": __version__,
            "models": serving.names,
            "tasks": [task.value for task in model.tasks],
            "max_model_len": model.max_model_len,
            "executor": model.executor,
            "grade": model.grade,
            "api": "/openapi.json",
        }
    )


@router.get("/kvasir/live")
async def live(request: HTTPRequest) -> Response:
    """The engine's counters, its answers in hand (ids of the asker's own ones alone), its blocks and last steps."""
    serving = serving_of(request)
    snapshot = await request.app.state.lookout.look()
    key: Key | None = request.scope["state"].get("key")
    meter = serving.front.meter
    latency = {"ttft": percentiles(meter.recent_first), "tpot": percentiles(meter.recent_paces)}
    content = to_json(snapshot, key.name if key else "")
    return json_response({**content, "latency": latency})


class Lookout:
    """Asks the engine for snapshots, one at a time and few a second, however many look. One per application."""

    def __init__(self, front: Front):
        self._front = front
        self._asked: asyncio.Task[Snapshot] | None = None
        self._time = 0.0

    async def look(self) -> Snapshot:
        """A snapshot of just now. Raises EngineDead."""
        if self._asked is None or (self._asked.done() and time.monotonic() - self._time >= FRESH):
            self._asked = asyncio.ensure_future(self._ask())
            self._asked.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever is left to hear
        return await asyncio.shield(self._asked)

    async def _ask(self) -> Snapshot:
        try:
            return await asyncio.wait_for(self._front.look(), ENGINE_SECONDS)
        except TimeoutError:
            raise EngineDead("the engine does not answer", "it is in a long step, or hung") from None
        finally:
            self._time = time.monotonic()


def percentiles(values: Sequence[float]) -> dict[str, float | int | None]:
    """Nearest ranks of what was measured last, in its unit."""
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
        "window": group.window,
        "total": group.total,
        "per_cell": group.per_cell,
        "cells": group.runs,
    }
