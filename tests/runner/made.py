"""Requests, and cores over tiny random models, for the tests of both runners."""

from __future__ import annotations

from kvasir.engine.core import EngineCore
from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of


def request(id: str, ids, **params) -> Request:
    params = {"temperature": 0.0, "max_tokens": 6, "seed": 0, "logprobs": 0, "ignore_eos": True, **params}
    return Request(id, tuple(ids), SamplingParams(**params))


def small_core(folder: str, executor: str, **options) -> EngineCore:
    core = core_of(folder, **{"threads": 1, "block_size": 16, "executor": executor, **options})
    assert core.info.executor == executor
    return core
