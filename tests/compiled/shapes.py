"""Models of real shapes without weights, and the launches of their steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.models import SHAPES, config_of, model_with
from kvasir.graph.fold import fold
from kvasir.graph.forward import Forward, StepBuffers
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.places import no_memory
from kvasir.layers.tensors import torch_dtype
from kvasir.ops.launch import Launch, recording
from kvasir.ops.linear.triton_matrix import DeviceMatrix, matrix_from_floats
from kvasir.program.trace import trace
from kvasir.runner.device_packing import segments_of

__all__ = ["SHAPES", "Launches", "forward_of", "launches_of", "model_of"]
BLOCK_SIZE = 64


def matrix(rows: int, cols: int, segments: int, dtype: str) -> DeviceMatrix:
    """A matrix without memory."""

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.empty(array.shape, dtype=torch_dtype(dtype), device="meta")

    found = matrix_from_floats(no_memory((1, cols)), dtype, segments, put)
    return type(found)(found.format, rows, cols, segments, dtype, put(no_memory((rows, cols))))


def model_of(name: str, dtype: str, layers: int = 0) -> Any:
    """The model, its weights on torch's `meta` device. layers: how many, 0 for all."""

    def make(leaf: Any, rows: int, cols: int) -> DeviceMatrix:
        return matrix(rows, cols, segments_of(leaf, rows, cols, "F32"), dtype)

    return model_with(config_of(name, layers), make, "meta")


@dataclass(frozen=True)
class Launches:
    """The launches of a step: of its token rows, and of the rows whose logits are computed."""

    rows: list[Launch]
    chosen: list[Launch]


def forward_of(name: str, dtype: str, layers: int, *, rows: int = 256, tokens: int = 512) -> Forward:
    """A forward without memory. rows: of the runner."""
    model = model_of(name, dtype, layers)
    traced = trace(model)
    cache = KVCache(model.cache_spec(), [64], BLOCK_SIZE, torch_dtype(dtype), "meta")
    step = StepBuffers.empty(
        rows=rows, ids=40961, blocks=[641], pieces=rows, tokens=tokens, chosen=64, device=torch.device("meta")
    )
    return Forward(traced, fold(traced), cache, step, max_tokens=tokens, max_chosen=64, positions=64, dtype=dtype)


def launches_of(forward: Forward, bucket: int) -> Launches:
    """The launches of a step of `bucket` token rows, whose logits are all computed up to 64."""
    with recording(dry=True) as rows:
        forward.run_rows(bucket)
    with recording(dry=True) as chosen:
        forward.run_chosen(min(bucket, 64))
    return Launches(rows, chosen)
