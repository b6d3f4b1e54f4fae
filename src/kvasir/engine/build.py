"""Builds an engine: files, device, model, KV memory, runner, scheduler. Runs in the process that computes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from kvasir.config import DeviceFacts as Facts
from kvasir.config import EngineConfig, EngineOptions, ModelFacts, check
from kvasir.engine.core import EngineCore
from kvasir.engine.load_text import load_text
from kvasir.engine.progress import Progress
from kvasir.environment import env, prepare_torch
from kvasir.errors import ConfigError
from kvasir.guided.guide import GrammarGuides
from kvasir.guided.vocabulary import Vocabulary
from kvasir.plan import Capacity
from kvasir.resolve import resolve
from kvasir.sched.drafts import Drafter
from kvasir.sched.scheduler import Scheduler
from kvasir.spec.drafter import Speculator
from kvasir.speculation import MAX_DRAFTED, SOURCES, parse
from kvasir.types import ModelInfo, Task


def build_core(options: EngineOptions, progress: Progress | None = None, drafter: Drafter | None = None) -> EngineCore:
    """Builds the core for a model; its `summary` lists the decisions and their reasons. drafter: in place of those that
    the options name. Raises KvasirError."""
    check(options)
    prepare_torch()
    begun = time.perf_counter()
    need_executor()
    from kvasir import device as devices
    from kvasir import ops
    from kvasir.engine.drafting import with_drafter
    from kvasir.engine.tier import make_tier
    from kvasir.models.config import read_generation_config
    from kvasir.models.overrides import read_overrides
    from kvasir.ops import native
    from kvasir.runner.footprint import footprint_of
    from kvasir.runner.load import LoadOptions, load_model
    from kvasir.runner.make import cache_groups_of, make_runner
    from kvasir.runner.numerics import numerics_version
    from kvasir.weights.find import find_model

    imported = time.perf_counter()
    device = devices.detect(options.device)
    threads = options.threads or device.threads
    devices.set_threads(threads)
    if isa := env("KVASIR_ISA"):
        native.force_isa(isa)  # raises if unavailable: an explicit request is never silently ignored
    compiled = partial(progress, kernels=True) if progress else None
    files = find_model(options.model, options.revision)
    overrides = read_overrides(options.rope_scaling, options.hf_overrides)
    drafters = parse(options.speculate)
    load_options = LoadOptions(
        options.executor, options.block_size, options.kv_dtype, options.quantize or "", threads, overrides=overrides,
        mtp=drafters.weights == "mtp",
    )  # fmt: skip
    with devices.memory_for("the model's weights"):
        loaded = load_model(files, options.dtype, device.kind, progress, load_options)
        loaded = with_drafter(loaded, drafters, options, device.kind, threads, progress)
    model, dtype = loaded.model, loaded.dtype
    executor = loaded.executor
    kernels = ops.choose(device, dtype)
    kv_dtype = dtype if options.kv_dtype == "auto" else options.kv_dtype
    groups = cache_groups_of(loaded, options.block_size, kv_dtype)
    facts = ModelFacts(
        max_positions=model.config.context_length,
        dtype=dtype,
        bidirectional=model.bidirectional,
        groups=groups,
        executor=executor,
        notes=loaded.notes,
        short_until=max((rope.scaling.short_until for rope in loaded.ropes()), default=0),
        footprint=lambda tokens: footprint_of(
            loaded, kind=device.kind, tokens=tokens, rows=options.max_num_seqs, threads=threads,
            block_size=options.block_size, kv_dtype=kv_dtype, progress=compiled,
        ),
    )  # fmt: skip
    _, host_available = devices.host_memory()
    machine = Facts(device.kind, devices.available(device.kind), device.threads, device.processors, host_available)
    with devices.memory_for("the buffers of a step"):
        config = resolve(options, facts, machine)
    for rope in loaded.ropes():
        rope.serve(config.max_model_len)
    capacity = Capacity(
        config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.block_size,
        groups, config.num_blocks, model.config.vocab_size, max_drafted=MAX_DRAFTED,
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
        executor=executor,
        numerics=numerics_version(executor, device.name, [f"{c.op} {c.chosen}" for c in kernels], device.kind),
        num_parameters=loaded.num_parameters,
        embedding_size=model.config.pooling.size(model.config.width),
        token_embedding_size=model.config.pooling.token_size(model.config.width),
        token_weights=model.config.pooling.token_heads.weigh,
        labels=model.config.pooling.labels,
        activation=model.config.pooling.activation,
        pair_types=getattr(model, "has_pairs", False),
        default_sampling=generation.sampling,
        weight_bytes_read=loaded.trace.weight_bytes_read if loaded.trace else 0,
        kv_bytes_per_token=tuple((g.kind.bound, g.bytes_per_block // options.block_size) for g in groups),
        targets=config.targets,
        drafters=config.drafters.methods if Task.GENERATE in model.tasks else (),
    )
    with devices.memory_for("the KV cache and the buffers of a step"):
        runner = make_runner(loaded, config, capacity, info, device.kind)
    try:
        tier = make_tier(options, config, files, info, runner.cache)
    except BaseException:
        runner.close()
        raise
    guides = GrammarGuides(lambda: _vocabulary(options, info))
    scheduler = Scheduler(
        runner.capacity,
        eos_ids=info.eos_ids,
        suppressed=tuple(i for i in generation.suppressed if i < info.vocab_size),
        bidirectional=facts.bidirectional,
        max_chunk=config.max_chunk,
        max_waiting=config.max_waiting,
        prefix_cache=config.prefix_cache,
        eviction=config.cache_eviction,
        targets=config.targets,
        tier=tier,
        tier_bytes=config.load_bytes,
        guides=guides,
        jump_ahead=config.jump_ahead,
        drafter=drafter or _speculator(config, info),
    )
    seconds = (imported - begun, time.perf_counter() - imported)
    if executor == "program":
        kernels_line = f"{native.isa()}, every op; weights {_sizes(loaded.formats)}"
    elif executor == "graph":
        kernels_line = f"Triton, every op; weights {_sizes(loaded.formats)}"
    else:
        chosen = [f"{c.op} {c.chosen}" for c in kernels if c.chosen != ops.BODY]
        native_used = [native.isa()] if any(c.chosen == "native" for c in kernels) else []
        kernels_line = f"{', '.join(chosen + native_used) or 'no native kernels'}; plain torch otherwise"
    return EngineCore(runner, scheduler, summarize(config, runner.info, kernels_line, seconds), guides.warm)


def _speculator(config: EngineConfig, info: ModelInfo) -> Drafter | None:
    return Speculator(info.drafters, config.targets, config.draft_max) if info.drafters else None


def _sizes(formats: Mapping[str, int]) -> str:
    """Weight formats with their bytes, the largest first."""
    found = sorted(formats.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in found)


def need_executor() -> None:
    """Raises ConfigError if neither executor can run here: without the native kernels and without torch."""
    from kvasir.device import need_torch
    from kvasir.ops import native

    if not native.available():
        need_torch(native.reason())


def _vocabulary(options: EngineOptions, info: ModelInfo) -> Vocabulary:
    """Raises KvasirError for a model without a tokenizer."""
    tokenizer, _ = load_text(options)
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer, which grammars need")
    return Vocabulary(tokenizer, info.vocab_size, tuple(dict.fromkeys((*info.eos_ids, *tokenizer.eos_ids))))


def summarize(config: EngineConfig, info: ModelInfo, kernels: str, seconds: tuple[float, float]) -> list[str]:
    """The summary lines for users. kernels: which kernels compute. seconds: of imports, and of the rest."""
    tokens = " + ".join(str((n - 1) * config.block_size) for n in config.num_blocks)
    kinds = {Task.GENERATE: "text", Task.EMBED: "embeddings", Task.TOKEN_CLASSIFY: "labels of tokens"}
    kind = next((kind for task, kind in kinds.items() if task in info.tasks), ", ".join(info.labels[:4]) or "scores")
    return [
        f"model     {info.name}: {info.architecture}, {info.num_parameters / 1e6:.1f} M parameters, {kind}",
        f"computes  {info.dtype} on {info.device}, {config.executor} executor, {config.threads} threads"
        f"{', overlapped' if config.overlap else ''}, {info.grade}, numerics {info.numerics[:16]}",
        f"kernels   {kernels}",
        f"context   {config.max_model_len} tokens, {config.max_num_seqs} sequences at once, "
        f"{config.max_num_batched_tokens} tokens a step",
        f"KV memory {tokens} tokens in blocks of {config.block_size}, {config.kv_dtype}, "
        f"{config.kv_bytes / 2**20:.0f} MiB, "
        f"{f'prefix cache on ({config.cache_eviction})' if config.prefix_cache else 'no prefix cache'}",
        *([f"drafts    {_drafts(config, info)}"] if Task.GENERATE in info.tasks else []),
        f"memory    {_memory(config)}",
        *([f"host      {config.cache_host / 2**30:.1f} GiB for prefixes"] if config.cache_host else []),
        *([f"disk      {_disk(config)}"] if config.cache_dir else []),
        *([f"serving   prefixes on {config.cache_offer}"] if config.cache_offer else []),
        *([f"peer      loads prefixes from {config.cache_peer}"] if config.cache_peer else []),
        f"ready     in {sum(seconds):.1f} s ({seconds[0]:.1f} s for imports)",
        *(f"note      {n}" for n in config.notes),
    ]


def _drafts(config: EngineConfig, info: ModelInfo) -> str:
    if not info.drafters:
        return "off"
    names = [f"{name} {config.drafters.source}" if name in SOURCES else name for name in info.drafters]
    until = f", {config.drafters.weights} up to {config.draft_max_model_len} tokens" * bool(config.draft_max_model_len)
    return f"{', '.join(names)}, at most {config.draft_max} ids a step{until}"


def _memory(config: EngineConfig) -> str:
    """How memory is split, in the order of the decisions."""
    f, length = config.footprint, config.max_model_len
    has_tier = bool(config.cache_host or config.cache_dir or config.cache_peer)
    parts = {
        "weights": f.weights,
        "buffers of a step": f.buffers,
        "samplers": f.samplers,
        "rotary angles": f.angles * length,
        "rows": f.rows * length,
        "KV": config.kv_bytes,
        "transfers to and from tiers": (config.load_bytes + config.save_bytes) * has_tier,
    }
    taken = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in parts.items() if size)
    return f"{taken}; {config.memory_left / 2**20:.0f} MiB stay free"


def _disk(config: EngineConfig) -> str:
    share = config.cache_write_share
    bound = f"; writing takes at most {share:.0%} of the time, or the time that reads save" if share < 1 else ""
    return f"{config.cache_dir}, up to {config.cache_disk / 2**30:.1f} GiB{bound}"
