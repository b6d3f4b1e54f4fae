"""Makes a runner of the graph executor; imports torch and Triton."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kvasir import device as devices
from kvasir.config import EngineConfig
from kvasir.graph.draws import LEVELS, Draws
from kvasir.graph.fold import fold
from kvasir.graph.forward import Forward, StepBuffers
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.kv_layout import KVLayout
from kvasir.layers.rope import Angles
from kvasir.layers.tensors import torch_dtype
from kvasir.memory import Footprint
from kvasir.ops.launch import recorded
from kvasir.plan import Capacity
from kvasir.runner import graph_selftest
from kvasir.runner.blocks import Copies
from kvasir.runner.footprint import ropes
from kvasir.runner.graph_executor import GraphExecutor, Record, buckets
from kvasir.runner.load import LoadedModel
from kvasir.runner.make_eager import copies_of
from kvasir.runner.runner import Runner
from kvasir.types import ModelInfo

MAX_CHOSEN = 64  # rows of logits that are computed at a time
MAX_DRAFTED = 16  # as in engine.build
_NODE_BYTES = 16 << 10  # of device memory per recorded launch: an estimate, CUDA documents none


def make_graph_runner(
    loaded: LoadedModel, config: EngineConfig, capacity: Capacity, info: ModelInfo, device: str
) -> Runner:
    """See `make.make_runner`."""
    assert loaded.trace is not None
    devices.set_threads(1 if device == "cpu" else config.threads)
    target = torch.device(device)
    dtype = torch_dtype(config.kv_dtype)
    cache = KVCache(loaded.model.cache_spec(), config.num_blocks, config.block_size, dtype, target)
    executor = make_executor(loaded, cache, capacity, overlaps=config.overlap, copies=copies_of(config, cache))
    return Runner(executor, capacity, replace(info, grade=graph_selftest.run(executor)))


def make_executor(
    loaded: LoadedModel,
    cache: KVCache,
    capacity: Capacity,
    *,
    overlaps: bool = False,
    copies: Copies | None = None,
) -> GraphExecutor:
    """The executor of a loaded model over a cache, its launches recorded."""
    assert loaded.trace is not None
    longest, size, rows = capacity.max_model_len, capacity.block_size, capacity.max_rows
    chosen = min(MAX_CHOSEN, max(rows, 1 + capacity.max_drafted))
    blocks = 1 + max(group.kind.blocks(longest, size) for group in capacity.groups)
    step = StepBuffers.empty(
        rows=rows,
        ids=longest + 1,
        blocks=[blocks] * len(capacity.groups),
        pieces=1 << (rows - 1).bit_length(),
        tokens=capacity.max_tokens_per_step,
        chosen=chosen,
        device=cache.device,
    )
    forward = Forward(
        loaded.trace, fold(loaded.trace), cache, step,
        max_tokens=capacity.max_tokens_per_step, max_chosen=chosen, positions=longest + 1, dtype=loaded.dtype,
    )  # fmt: skip
    executor = GraphExecutor(
        loaded.model, forward, max_tokens=capacity.max_tokens_per_step, max_chosen=chosen,
        record=_recorder(cache.device), overlaps=overlaps, copies=copies,
    )  # fmt: skip
    if cache.device.type == "cuda":
        executor.record_all()
    return executor


def graph_footprint(
    loaded: LoadedModel, *, kind: str, tokens: int, rows: int, block_size: int, kv_dtype: str
) -> Footprint:
    """See `footprint.footprint_of`. The buffers are laid out over a cache of the smallest size, without memory."""
    assert loaded.trace is not None
    model = loaded.model
    layout = KVLayout.of(model.cache_spec())
    meta = torch.device("meta")
    cache = KVCache(model.cache_spec(), [1] * len(layout.groups), block_size, torch_dtype(kv_dtype), meta)
    groups, chosen = len(layout.groups), min(MAX_CHOSEN, max(rows, 1 + MAX_DRAFTED))
    pieces = 1 << (rows - 1).bit_length()
    step = StepBuffers.empty(
        rows=rows, ids=1, blocks=[1] * groups, pieces=pieces, tokens=tokens, chosen=chosen, device=meta
    )
    forward = Forward(
        loaded.trace, fold(loaded.trace), cache, step,
        max_tokens=tokens, max_chosen=chosen, positions=1, dtype=loaded.dtype,
    )  # fmt: skip
    vocab = model.config.vocab_size
    sampler = num_bytes(Draws(step.ids, chosen, vocab)) if forward.logits is not None else 0
    kept = 4 * vocab * (rows + MAX_DRAFTED)  # logits of rows that wait for a mask
    recorded = (len(buckets(tokens)) + len(LEVELS) * len(buckets(chosen))) * len(fold(loaded.trace)) * _NODE_BYTES
    return Footprint(
        weights=loaded.held,
        buffers=forward.num_bytes + num_bytes(step) + (recorded if kind == "cuda" else 0),
        samplers=sampler + kept,
        angles=sum(Angles.num_bytes(rope, 1) for rope in ropes(model)),
        rows=(rows + 1) * 4 * (1 + -(-groups // block_size)),
    )


def num_bytes(holder: Any) -> int:
    """Bytes of all tensors that an object holds, also through its own objects."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(holder))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif type(value).__module__.startswith("kvasir."):
        names = getattr(value, "__slots__", None) or vars(value)
        for name in names:
            yield from _tensors(getattr(value, name))


def _recorder(device: torch.device) -> Record:
    if device.type == "cpu":
        return recorded
    from kvasir.device.replays import Recorder

    return Recorder().record
