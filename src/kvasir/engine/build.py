"""Builds an engine: files, device, model, KV memory, runner, scheduler. Runs in the process that computes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvasir.config import EngineConfig, EngineOptions, check
from kvasir.device import memory_for
from kvasir.engine.core import EngineCore
from kvasir.engine.load_text import load_text
from kvasir.engine.progress import Progress
from kvasir.environment import prepare_torch
from kvasir.errors import ConfigError
from kvasir.guided.guide import GrammarGuides
from kvasir.guided.vocabulary import Vocabulary
from kvasir.kv.tiers.connector import KVConnector
from kvasir.resolve import resolve
from kvasir.sched.drafts import Drafter
from kvasir.sched.scheduler import Scheduler
from kvasir.spec.drafter import Speculator
from kvasir.speculation import SOURCES
from kvasir.types import ModelInfo, Task

if TYPE_CHECKING:
    from kvasir.engine.parts import Model
    from kvasir.runner.runner import Runner


def build_core(options: EngineOptions, progress: Progress | None = None, drafter: Drafter | None = None) -> EngineCore:
    """Builds the core for a model; its `summary` lists the decisions and their reasons. drafter: in place of those that
    the options name. Raises KvasirError."""
    check(options)
    prepare_torch()
    begun = time.perf_counter()
    need_executor()
    from kvasir.engine import parts
    from kvasir.engine.tier import make_tier

    imported = time.perf_counter()
    model = parts.load(options, progress)
    facts = parts.facts_of(model, options, progress)
    with memory_for("the buffers of a step"):
        config = resolve(options, facts, parts.device_facts(model.device))
    info = parts.describe(model, config)
    runner = parts.make_runner(model, config, info)
    try:
        tier = make_tier(options, config, model.files, info, runner.cache)
    except BaseException:
        runner.close()
        raise
    guides = GrammarGuides(lambda: _vocabulary(options, info))
    scheduler = _scheduler(model, config, runner, tier, guides, drafter or _speculator(config, info))
    seconds = (imported - begun, time.perf_counter() - imported)
    return EngineCore(
        runner, scheduler, summarize(config, runner.info, parts.kernels_line(model), seconds), guides.warm
    )


def _scheduler(
    model: Model,
    config: EngineConfig,
    runner: Runner,
    tier: KVConnector | None,
    guides: GrammarGuides,
    drafter: Drafter | None,
) -> Scheduler:
    return Scheduler(
        runner.capacity,
        eos_ids=model.generation.eos_ids,
        suppressed=tuple(i for i in model.generation.suppressed if i < runner.info.vocab_size),
        bidirectional=model.loaded.model.bidirectional,
        max_chunk=config.max_chunk,
        max_waiting=config.max_waiting,
        prefix_cache=config.prefix_cache,
        eviction=config.cache_eviction,
        targets=config.targets,
        tier=tier,
        tier_bytes=config.load_bytes,
        guides=guides,
        jump_ahead=config.jump_ahead,
        drafter=drafter,
    )


def _speculator(config: EngineConfig, info: ModelInfo) -> Drafter | None:
    return Speculator(info.drafters, config.targets, config.draft_max) if info.drafters else None


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
