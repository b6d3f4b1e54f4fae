"""Puts an engine together: files, device, model, KV memory, runner, scheduler. Called in the process that computes."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvasir.config import DeviceFacts as Facts
from kvasir.config import EngineConfig, EngineOptions, ModelFacts, check, env, prepare_torch, resolve
from kvasir.engine.core import EngineCore
from kvasir.plan import Capacity
from kvasir.sched.scheduler import Scheduler
from kvasir.types import ModelInfo, Task

Progress = Callable[[int, int], None]


def build_core(options: EngineOptions, progress: Progress | None = None) -> EngineCore:
    """The core for a model; its `summary` says what was decided and why. Raises KvasirError."""
    check(options)
    prepare_torch()
    begun = time.perf_counter()
    from kvasir import device as devices
    from kvasir import ops
    from kvasir.layers.kv_cache import KVCache, cache_groups
    from kvasir.models.config import read_generation_config
    from kvasir.ops import native
    from kvasir.runner.load import load_model
    from kvasir.runner.model_runner import ModelRunner
    from kvasir.runner.selftest import run as self_test
    from kvasir.weights.find import find_model
    from kvasir.weights.load import DTYPES

    imported = time.perf_counter()
    device = devices.detect(options.device)
    threads = options.threads or device.threads
    devices.set_threads(threads)
    if isa := env("KVASIR_ISA"):
        native.force_isa(isa)  # raises where it cannot be had: what was asked for is never silently left out
    files = find_model(options.model, options.revision)
    loaded = load_model(files, options.dtype, device.torch, progress)
    model, dtype = loaded.model, _name(DTYPES, loaded.dtype)
    kernels = ops.choose(device, dtype)
    kv_dtype = DTYPES[dtype if options.kv_dtype == "auto" else options.kv_dtype]
    groups = cache_groups(model.cache_spec(), options.block_size, kv_dtype)
    facts = ModelFacts(
        max_positions=model.config.context_length,
        dtype=dtype,
        bidirectional=Task.GENERATE not in model.tasks,
        bytes_per_block=tuple(g.bytes_per_block for g in groups),
        windows=tuple(g.window for g in groups),
    )
    config = resolve(options, facts, Facts(device.kind, device.memory_available, threads))
    cache = KVCache(model.cache_spec(), config.num_blocks, config.block_size, kv_dtype, device.torch)
    capacity = Capacity(
        config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.block_size,
        groups, config.num_blocks, model.config.vocab_size,
    )  # fmt: skip
    generation = read_generation_config(files.root if files.kind == "hf" else "", loaded.config)
    info = ModelInfo(
        name=config.served_model_name,
        architecture=loaded.architecture,
        tasks=tuple(model.tasks),
        vocab_size=model.config.vocab_size,
        max_model_len=config.max_model_len,
        eos_ids=generation.eos_ids,
        dtype=dtype,
        device=device.kind,
        grade=self_test(model, cache),
        executor=config.executor,
        num_parameters=loaded.num_parameters,
        embedding_size=model.config.width,
        default_sampling=generation.sampling,
    )
    runner = ModelRunner(model, cache, capacity, info, device.torch)
    scheduler = Scheduler(
        capacity,
        eos_ids=info.eos_ids,
        bidirectional=facts.bidirectional,
        max_chunk=config.max_chunk,
        max_waiting=config.max_waiting,
    )
    seconds = (imported - begun, time.perf_counter() - imported)
    chosen = [f"{c.op} {c.chosen}" for c in kernels if c.chosen != ops.BODY]
    if any(c.chosen == "native" for c in kernels):
        chosen.append(native.isa())
    return EngineCore(runner, scheduler, summarize(config, info, chosen, seconds))


def _name(dtypes: dict, dtype: object) -> str:
    return next(name for name, d in dtypes.items() if d == dtype)


def summarize(config: EngineConfig, info: ModelInfo, kernels: list[str], seconds: tuple[float, float]) -> list[str]:
    """What was decided, for people. `kernels`: those that are not plain torch."""
    tokens = " + ".join(str((n - 1) * config.block_size) for n in config.num_blocks)
    kind = "embeddings" if Task.EMBED in info.tasks and Task.GENERATE not in info.tasks else "text"
    return [
        f"model     {info.name}: {info.architecture}, {info.num_parameters / 1e6:.1f} M parameters, {kind}",
        f"computes  {info.dtype} on {info.device}, {config.executor} executor, {config.threads} threads, {info.grade}",
        f"kernels   {', '.join(kernels) or 'none of our own'}; all else plain torch",
        f"context   {config.max_model_len} tokens, {config.max_num_seqs} sequences at once, "
        f"{config.max_num_batched_tokens} tokens a step",
        f"KV memory {tokens} tokens in blocks of {config.block_size}, {config.kv_dtype}, "
        f"{config.kv_bytes / 2**20:.0f} MiB",
        f"ready     in {sum(seconds):.1f} s ({seconds[0]:.1f} s of it imports)",
        *(f"note      {n}" for n in config.notes),
    ]
