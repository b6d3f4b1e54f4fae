"""Requests, files of tiny random models, and cores over them, for the tests of both runners."""

from __future__ import annotations

import json
from pathlib import Path

from kvasir.engine.core import EngineCore
from kvasir.layers.tensors import tensor_of
from kvasir.types import Request, SamplingParams
from kvasir.weights.find import find_model
from kvasir.weights.local import ModelFiles
from tests.engine.cores import core_of
from tests.models.families import config_of


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


def files_of(folder: Path, family: str = "llama", **change) -> ModelFiles:
    """A family of tests.models.families with random weights, in a new folder."""
    from safetensors.torch import save_file

    from kvasir.models.registry import model_class_for
    from tests.models.oracle import dummy_source

    config = {**config_of(family), **change}
    kind = model_class_for(config)
    source = dummy_source(kind(kind.Config.from_hf(config)))
    save_file({name: tensor_of(source.array(name)) for name in source.names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return find_model(folder)
