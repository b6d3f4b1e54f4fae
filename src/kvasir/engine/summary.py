"""The lines that tell users at the start what an engine has decided."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.config import EngineConfig
from kvasir.speculation import SOURCES
from kvasir.types import ModelInfo, Task

_WARNINGS = ("note", "tools")  # what such lines begin with


def summarize(config: EngineConfig, info: ModelInfo, kernels: str, seconds: tuple[float, float]) -> list[str]:
    """The summary lines for users. kernels: which kernels compute. seconds: of imports, and of the rest."""
    tokens = " + ".join(str((n - 1) * config.block_size) for n in config.num_blocks)
    kinds = {Task.GENERATE: "text", Task.EMBED: "embeddings", Task.TOKEN_CLASSIFY: "labels of tokens"}
    kind = next((kind for task, kind in kinds.items() if task in info.tasks), ", ".join(info.labels[:4]) or "scores")
    return [
        f"model     {info.name}: {info.architecture}, {info.num_parameters / 1e6:.1f} M parameters, {kind}",
        f"computes  {info.dtype} on {info.device}, {config.executor} executor, {_ranks(config)}{config.threads} threads"
        f"{', overlapped' if config.overlap else ''}, {info.grade}, numerics {info.numerics[:16]}",
        f"kernels   {kernels}",
        f"context   {config.max_model_len} tokens, {config.max_num_seqs} sequences at once, "
        f"{config.max_num_batched_tokens} tokens a step",
        f"KV memory {tokens} tokens in blocks of {config.block_size}, {config.kv_dtype}, "
        f"{config.kv_bytes / 2**20:.0f} MiB, {_full_contexts(config)}"
        f"{f'prefix cache on ({config.cache_eviction})' if config.prefix_cache else 'no prefix cache'}",
        *([f"drafts    {_drafts(config, info)}"] if Task.GENERATE in info.tasks else []),
        f"memory    {_memory(config)}",
        *([f"host      {config.cache_host / 2**30:.1f} GiB for prefixes"] if config.cache_host else []),
        *([f"disk      {_disk(config)}"] if config.cache_dir else []),
        *([f"serving   prefixes on {config.cache_offer}"] if config.cache_offer else []),
        *([f"peer      loads prefixes from {config.cache_peer}"] if config.cache_peer else []),
        *([f"blocks    {_exchange(config, info)}"] if config.exchanges else []),
        f"ready     in {sum(seconds):.1f} s ({seconds[0]:.1f} s for imports)",
        *(f"note      {n}" for n in config.notes),
    ]


def warnings(lines: Sequence[str]) -> list[str]:
    """Of the lines of a summary those that everybody should read: what is not as a user may expect it."""
    return [f"note: {text.strip()}" for kind, _, text in (line.partition(" ") for line in lines) if kind in _WARNINGS]


def _full_contexts(config: EngineConfig) -> str:
    return f"{config.kv_share:.1%} of all full contexts, " if config.kv_share < 1 else ""


def _exchange(config: EngineConfig, info: ModelInfo) -> str:
    what = {"prefill": "sends those of prompts", "decode": "takes those of prompts"}.get(config.role, "sends and takes")
    where = f" at {info.transfers_at}" if info.transfers_at else ""
    return f"{what}{where}, {config.transfer_bytes / 2**20:.0f} MiB on their way in each direction"


def _ranks(config: EngineConfig) -> str:
    stages = f"{config.pipeline_parallel} stages of " if config.pipeline_parallel > 1 else ""
    return stages + (f"{config.tensor_parallel} ranks of " if config.tensor_parallel > 1 else "")


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
        "blocks of other engines": 2 * config.transfer_bytes,
    }
    taken = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in parts.items() if size)
    return f"{taken}; {config.memory_left / 2**20:.0f} MiB stay free"


def _disk(config: EngineConfig) -> str:
    share = config.cache_write_share
    bound = f"; writing takes at most {share:.0%} of the time, or the time that reads save" if share < 1 else ""
    return f"{config.cache_dir}, up to {config.cache_disk / 2**30:.1f} GiB{bound}"
