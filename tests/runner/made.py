"""Requests, and cores over tiny random models, for the tests of both runners."""

from __future__ import annotations

from kvasir.engine.core import EngineCore
from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of


def request(id: str, ids, **params) -> Request:
    params = {"temperature": 0.0, "max_tokens": 6, "seed": 0, "logprobs": 0, "ignore_eos": True, **params}
    return Request(id, tuple(ids), SamplingParams(**params))


def small_core(folder: str, executor: str, **options) -> EngineCore:
    """executor: "program", "eager", or "queued" (tests.runner.queued)."""
    kind = "eager" if executor == "queued" else executor
    core = core_of(folder, **{"threads": 1, "block_size": 16, "executor": kind, **options})
    assert core.info.executor == kind
    if executor == "queued":
        from tests.runner.queued import queue  # which needs torch

        queue(core)
    return core
