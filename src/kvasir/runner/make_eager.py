"""Makes a runner of the eager executor; imports torch."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvasir import device as devices
from kvasir.config import EngineConfig
from kvasir.device.copies import Copier, copier
from kvasir.errors import ConfigError
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.kv_layout import CODED, cache_groups
from kvasir.layers.rope_tensors import reserve
from kvasir.layers.tensors import torch_dtype
from kvasir.models.drafting import TARGET
from kvasir.plan import CacheGroup, Capacity
from kvasir.runner import eager_selftest
from kvasir.runner.adapters import ModelAdapters
from kvasir.runner.block_proposals import proposer_of
from kvasir.runner.eager_draft import eager_draft
from kvasir.runner.eager_executor import EagerExecutor
from kvasir.runner.load import LoadedModel
from kvasir.runner.runner import Runner
from kvasir.types import ModelInfo
from kvasir.weights.load import DTYPES


def eager_cache_groups(loaded: LoadedModel, block_size: int, kv_dtype: str) -> tuple[CacheGroup, ...]:
    """See `make.cache_groups_of`."""
    if kv_dtype not in (*DTYPES, *(CODED if loaded.executor == "graph" else ())):
        raise ConfigError(f"the {loaded.executor} executor has no {kv_dtype} KV cache", "use --kv-dtype auto")
    return cache_groups(loaded.layout, block_size, kv_dtype)


def make_eager_runner(
    loaded: LoadedModel, config: EngineConfig, capacity: Capacity, info: ModelInfo, device: str
) -> Runner:
    """See `make.make_runner`."""
    model, target = loaded.model, torch.device(device)
    # MKL's float32 products depend on the number of threads on some processors.
    devices.set_threads(1 if device == "cpu" and loaded.dtype == "float32" else config.threads)
    for rope in loaded.ropes():
        reserve(rope, capacity.max_model_len + 1, target)
    cache = KVCache(loaded.layout, config.num_blocks, config.block_size, torch_dtype(config.kv_dtype), target)
    own = cache.of(TARGET)
    grade = eager_selftest.run(model, own)
    executor = EagerExecutor(
        model, own, capacity.max_tokens_per_step,
        overlaps=config.overlap, hidden=loaded.hidden, copies=copies_of(config, cache),
    )  # fmt: skip
    proposer = None
    if loaded.draft:
        forward = eager_draft(loaded.draft, executor, cache, capacity.max_tokens_per_step)
        proposer = proposer_of(
            loaded.draft, forward, cache.groups, cache.block_size, capacity.vocab_size, config.draft_max_model_len
        )
    adapters = ModelAdapters(model, loaded.config, executor, config.max_lora_rank)
    return Runner(executor, capacity, replace(info, grade=grade), proposer, adapters)


def copies_of(config: EngineConfig, cache: KVCache) -> Copier | None:
    """Transfers blocks to and from a tier or another engine; None if there is neither."""
    if not (config.cache_host or config.cache_dir or config.cache_peer or config.exchanges):
        return None
    return copier(cache.device, max(group.bytes_per_block for group in cache.groups))
