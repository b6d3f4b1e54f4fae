"""Builds an engine: files, device, model, KV memory, runner, scheduler. Runs in the process that computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvasir.config import EngineConfig, EngineOptions, check
from kvasir.device import memory_for
from kvasir.engine.adapter_loader import make_adapters
from kvasir.engine.core import EngineCore
from kvasir.engine.load_text import load_text
from kvasir.engine.progress import Progress
from kvasir.engine.summary import summarize
from kvasir.environment import prepare_torch
from kvasir.errors import ConfigError
from kvasir.guided.guide import GrammarGuides
from kvasir.guided.vocabulary import Vocabulary
from kvasir.kv.tiers.connector import KVConnector
from kvasir.kv.transfer.exchange import BlockExchange
from kvasir.models.drafting import DraftModel, drafts_blocks
from kvasir.resolve import resolve
from kvasir.sched.drafts import Drafter
from kvasir.sched.scheduler import Scheduler
from kvasir.spec.drafter import Speculator
from kvasir.types import ModelInfo

if TYPE_CHECKING:
    from kvasir.engine.parts import Model
    from kvasir.runner.runner import Runner


def build_core(
    options: EngineOptions,
    progress: Progress | None = None,
    drafter: Drafter | None = None,
    on_loss: Callable[[str], None] | None = None,
) -> EngineCore:
    """Builds the core for a model; its `summary` lists the decisions and their reasons. drafter: in place of those that
    the options name. on_loss: see `ranks.RankProcesses`. Raises KvasirError."""
    check(options)
    prepare_torch()
    begun = time.perf_counter()
    need_executor()
    from kvasir.engine import parts

    imported = time.perf_counter()
    model = parts.load(options, progress, on_loss)
    try:
        return _core(model, options, progress, drafter, (imported - begun, imported))
    except BaseException:
        model.close()
        raise


def _core(
    model: Model,
    options: EngineOptions,
    progress: Progress | None,
    drafter: Drafter | None,
    imports: tuple[float, float],
) -> EngineCore:
    """imports: seconds that they took, and when they ended."""
    from kvasir.engine import parts
    from kvasir.engine.tier import identify, make_tier
    from kvasir.engine.transfer import make_exchange, with_inbox

    facts = parts.facts_of(model, options, progress)
    with memory_for("the buffers of a step"):
        config = resolve(options, facts, parts.device_facts(model))
    info = parts.describe(model, config)
    runner = parts.make_runner(model, config, info)
    tier = exchange = weights = None
    try:
        weights = identify(options, config, model.files)
        tier = make_tier(options, config, info, runner.cache, weights)
        exchange = make_exchange(options, config, info, runner.cache, weights)
    except BaseException:
        if tier:
            tier.close(0.0)
        if weights:
            weights.close()
        runner.close()
        raise
    if exchange:
        tier = with_inbox(tier, exchange)
        runner.info = replace(runner.info, engine_id=exchange.engine_id, transfers_at=exchange.address)
    guides = GrammarGuides(lambda: _vocabulary(options, info))
    drafter = drafter or _speculator(config, info, model.loaded.draft)
    scheduler = _scheduler(model, config, runner, tier, guides, drafter, exchange)
    seconds = (imports[0], time.perf_counter() - imports[1])
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
    exchange: BlockExchange | None,
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
        tier_bytes=max(config.load_bytes, config.transfer_bytes),
        guides=guides,
        jump_ahead=config.jump_ahead,
        drafter=drafter,
        adapters=make_adapters(runner, runner.info, config.max_cpu_loras),
        exchange=exchange,
    )


def _speculator(config: EngineConfig, info: ModelInfo, draft: DraftModel | None) -> Drafter | None:
    if not info.drafters:
        return None
    blocks = draft is not None and drafts_blocks(draft)
    return Speculator(info.drafters, config.targets, config.draft_max, blocks=blocks)


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
