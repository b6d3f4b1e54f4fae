"""Makes a runner for a loaded model: its cache, its executor, and its self-test grade."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvasir import device as devices
from kvasir.config import EngineConfig
from kvasir.errors import ConfigError
from kvasir.models.drafting import TARGET
from kvasir.ops.attention.native import FORMATS
from kvasir.plan import CacheGroup, Capacity
from kvasir.program.cache import NativeCache, cache_groups
from kvasir.program.calls import NO_HOOKS
from kvasir.runner import selftest
from kvasir.runner.adapters import ModelAdapters
from kvasir.runner.block_proposals import proposer_of
from kvasir.runner.load import LoadedModel
from kvasir.runner.make_program import held_layout, program_of
from kvasir.runner.program_draft import program_draft
from kvasir.runner.program_executor import ProgramExecutor
from kvasir.runner.runner import Runner
from kvasir.types import ModelInfo


def cache_groups_of(loaded: LoadedModel, block_size: int, kv_dtype: str) -> tuple[CacheGroup, ...]:
    """The cache's groups and their block sizes in bytes. Raises ConfigError for a kv_dtype that the executor lacks."""
    if loaded.executor != "program":
        from kvasir.runner.make_eager import eager_cache_groups

        return eager_cache_groups(loaded, block_size, kv_dtype)
    if kv_dtype not in FORMATS:
        raise ConfigError(f"the program executor has no {kv_dtype} KV cache", "use --kv-dtype auto")
    return cache_groups(loaded.layout, block_size, kv_dtype)


def make_runner(
    loaded: LoadedModel, config: EngineConfig, capacity: Capacity, info: ModelInfo, device: str = "cpu",
    share: Callable[[Any], Any] | None = None,
) -> Runner:  # fmt: skip
    """Allocates the cache and makes the runner. Its `info` has the grade of the start-up self-test. device: the kind,
    "cpu" for a program. share: makes what all ranks compute, if there are several, of rank 0's program, or of a
    function that makes rank 0's graph executor."""
    if loaded.executor == "eager":
        from kvasir.runner.make_eager import make_eager_runner

        return make_eager_runner(loaded, config, capacity, info, device)
    if loaded.executor == "graph":
        from kvasir.runner.make_graph import make_graph_runner

        return make_graph_runner(loaded, config, capacity, info, device, share)
    assert loaded.trace is not None
    devices.set_threads(1)  # torch's threads, if it is loaded, must not compete with the program's pool
    cache = NativeCache(held_layout(loaded), config.num_blocks, config.block_size, config.kv_dtype)
    sizes: dict[str, Any] = {
        "max_tokens": capacity.max_tokens_per_step,
        "max_rows": capacity.max_rows,
        "max_positions": capacity.max_model_len + 1,
    }
    program: Any = program_of(
        loaded, cache.of(TARGET), **sizes, threads=config.threads, max_drafted=capacity.max_drafted,
        apart=config.overlap, pin=config.pin, hooks=loaded.stream.hooks if loaded.stream else NO_HOOKS,
    )  # fmt: skip
    if share:
        program = share(program)
    grade = selftest.run_program(program)
    proposer = None
    if loaded.draft:
        forward = program_draft(loaded.draft, program, cache, **sizes)
        proposer = proposer_of(
            loaded.draft, forward, cache.groups, cache.block_size, program.vocab, config.draft_max_model_len
        )
    executor = ProgramExecutor(loaded.model, program, loaded.stream)
    adapters = ModelAdapters(loaded.model, loaded.config, executor, config.max_lora_rank)
    return Runner(executor, capacity, replace(info, grade=grade), proposer, adapters)
