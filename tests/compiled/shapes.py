"""Models of real shapes without weights, and the launches of their steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvasir.graph.fold import fold
from kvasir.graph.forward import Forward, StepBuffers
from kvasir.graph.matrices import split_rows
from kvasir.layers.embedding import Embedding
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.linear import QKV, Linear
from kvasir.layers.places import no_memory
from kvasir.layers.tensors import TensorPlace, torch_dtype
from kvasir.models.registry import model_class_for
from kvasir.ops.launch import Launch, recording
from kvasir.ops.linear.triton_matrix import DeviceMatrix, choose_segments, matrix_from_floats, stacked
from kvasir.program.trace import trace

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "8B": {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
BLOCK_SIZE = 64


def matrix(rows: int, cols: int, segments: int, dtype: str) -> DeviceMatrix:
    """A matrix without memory."""

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.empty(array.shape, dtype=torch_dtype(dtype), device="meta")

    found = matrix_from_floats(no_memory((1, cols)), dtype, segments, put)
    return type(found)(found.format, rows, cols, segments, dtype, put(no_memory((rows, cols))))


def model_of(name: str, dtype: str, layers: int = 0) -> Any:
    """The model, its weights on torch's `meta` device. layers: how many, 0 for all."""
    config = {**SHAPES[name], **({"num_hidden_layers": layers} if layers else {})}
    kind = model_class_for(config)
    model = kind(kind.Config.from_hf(config))
    place = TensorPlace(torch.float32, "meta")
    for _, leaf in model.walk():
        for tensor, shape in leaf.expects().items():
            if isinstance(leaf, Linear | Embedding) and tensor.rpartition(".")[2] == "weight":
                reduces = getattr(leaf, "reduces", False) or isinstance(leaf, QKV)
                programs = sum(leaf.outputs.values()) if isinstance(leaf, QKV) else shape[0]
                rows, cols = shape
                leaf.hold(tensor, matrix(rows, cols, choose_segments(programs, cols, 1, reduces), dtype))
            else:
                leaf.put(tensor, torch.empty(shape, device="meta"), place)
        if isinstance(leaf, QKV):
            held: dict[str, Any] = leaf.weights
            whole = stacked([held[part] for part in leaf.outputs])
            held.update(zip(leaf.outputs, split_rows(whole, list(leaf.outputs.values())), strict=True))
    return model


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
