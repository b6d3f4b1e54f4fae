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
from kvasir.layers.rope import ropes
from kvasir.layers.rope_tensors import reserve
from kvasir.layers.tensors import torch_dtype
from kvasir.plan import CacheGroup, Capacity
from kvasir.runner import eager_selftest
from kvasir.runner.eager_executor import EagerExecutor
from kvasir.runner.load import LoadedModel
from kvasir.runner.runner import Runner
from kvasir.types import ModelInfo
from kvasir.weights.load import DTYPES


def eager_cache_groups(loaded: LoadedModel, block_size: int, kv_dtype: str) -> tuple[CacheGroup, ...]:
    """See `make.cache_groups_of`."""
    if kv_dtype not in (*DTYPES, *(CODED if loaded.executor == "graph" else ())):
        raise ConfigError(f"the {loaded.executor} executor has no {kv_dtype} KV cache", "use --kv-dtype auto")
    return cache_groups(loaded.model.cache_spec(), block_size, kv_dtype)


def make_eager_runner(
    loaded: LoadedModel, config: EngineConfig, capacity: Capacity, info: ModelInfo, device: str
) -> Runner:
    """See `make.make_runner`."""
    model, target = loaded.model, torch.device(device)
    # MKL's float32 products depend on the number of threads on some processors.
    devices.set_threads(1 if device == "cpu" and loaded.dtype == "float32" else config.threads)
    for rope in ropes(model):
        reserve(rope, capacity.max_model_len + 1, target)
    cache = KVCache(model.cache_spec(), config.num_blocks, config.block_size, torch_dtype(config.kv_dtype), target)
    grade = eager_selftest.run(model, cache)
    executor = EagerExecutor(
        model, cache, capacity.max_tokens_per_step,
        overlaps=config.overlap, hidden=loaded.hidden, copies=copies_of(config, cache),
    )  # fmt: skip
    return Runner(executor, capacity, replace(info, grade=grade))


def copies_of(config: EngineConfig, cache: KVCache) -> Copier | None:
    """Transfers blocks to and from a tier; None if there is no tier."""
    if not (config.cache_host or config.cache_dir or config.cache_peer):
        return None
    return copier(cache.device, max(group.bytes_per_block for group in cache.groups))
