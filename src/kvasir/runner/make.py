"""Makes a runner for a loaded model: its cache, its executor, and its self-test grade."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvasir import device as devices
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.kv_layout import cache_groups
from kvasir.layers.rope_tensors import reserve
from kvasir.layers.tensors import torch_dtype
from kvasir.plan import CacheGroup, Capacity
from kvasir.program import cache as program_cache
from kvasir.program.cache import NativeCache
from kvasir.program.program import Program
from kvasir.runner import selftest
from kvasir.runner.eager_executor import EagerExecutor
from kvasir.runner.footprint import ropes
from kvasir.runner.load import LoadedModel
from kvasir.runner.program_executor import ProgramExecutor
from kvasir.runner.runner import Runner
from kvasir.types import ModelInfo
from kvasir.weights.load import DTYPES


def cache_groups_of(loaded: LoadedModel, block_size: int, kv_dtype: str) -> tuple[CacheGroup, ...]:
    """The cache's groups and their block sizes in bytes. Raises ConfigError for a kv_dtype that the executor lacks."""
    spec = loaded.model.cache_spec()
    if loaded.trace:
        return program_cache.cache_groups(spec, block_size, kv_dtype)
    if kv_dtype not in DTYPES:
        raise ConfigError(f"the eager executor has no {kv_dtype} KV cache", "use --kv-dtype auto")
    return cache_groups(spec, block_size, kv_dtype)


def make_runner(
    loaded: LoadedModel, config: EngineConfig, capacity: Capacity, info: ModelInfo, device: torch.device
) -> Runner:
    """Allocates the cache and makes the runner. Its `info` has the grade of the start-up self-test."""
    model, spec = loaded.model, loaded.model.cache_spec()
    if loaded.trace is None:
        if device.type == "cpu" and loaded.dtype == "float32":
            devices.set_threads(1)  # MKL's float32 products depend on the number of threads on some processors
        for rope in ropes(model):
            reserve(rope, capacity.max_model_len + 1, device)
        cache = KVCache(spec, config.num_blocks, config.block_size, torch_dtype(config.kv_dtype), device)
        grade = selftest.run(model, cache)
        info, copies = replace(info, grade=grade), _copies(config, cache)
        executor = EagerExecutor(
            model, cache, capacity.max_tokens_per_step, overlaps=config.overlap, hidden=loaded.hidden, copies=copies
        )
        return Runner(executor, capacity, info)
    devices.set_threads(1)  # torch's threads must not compete with the program's pool
    cache = NativeCache(spec, config.num_blocks, config.block_size, config.kv_dtype)
    program = Program(
        loaded.trace,
        cache,
        max_tokens=capacity.max_tokens_per_step,
        max_rows=capacity.max_rows,
        max_positions=capacity.max_model_len + 1,
        threads=config.threads,
        apart=config.overlap,
        pin=config.pin,
    )
    grade = selftest.run_program(program)
    return Runner(ProgramExecutor(model, program), capacity, replace(info, grade=grade))


def _copies(config: EngineConfig, cache: KVCache) -> devices.Copier | None:
    """Transfers blocks to and from a tier; None if there is no tier."""
    if not (config.cache_host or config.cache_dir or config.cache_peer):
        return None
    return devices.copier(cache.device, max(group.bytes_per_block for group in cache.groups))
