"""The table of statistics: what is counted, under which name it is exported, and where it is shown.

A field is a row. /metrics, the dashboard, the page's tiles and docs/metrics.md are derived from these rows; a field
that is not exported states the reason. The engine's owners of counts use the names of the rows (`counted`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from kvasir.batch_statistics import BATCHES, BatchStats
from kvasir.metrics import (
    STATISTIC,
    TOKEN_SECONDS,
    TOKENS,
    Chart,
    Histogram,
    StatisticRow,
    Tile,
    counter,
    each,
    gauge,
    histogram,
    recent,
    rows,
)
from kvasir.replica_statistics import FLEET, ReplicaStats
from kvasir.server_statistics import OPERATION, REQUESTS, HttpStats
from kvasir.types import ServiceClass

RECENT = 1024  # latest measurements kept
MOST_ADAPTERS = 100  # values of the label `adapter` of a model
OTHER_ADAPTERS = "all others"  # no adapter's name has a space

# Rows of the dashboard, in order.
LATENCY, TEXT = "Latency by class", "Tokens"
KV, TIERS, ENGINE = "KV memory and prefix cache", "Tiers", "Engine"
DASHBOARD = (REQUESTS, LATENCY, TEXT, BATCHES, KV, TIERS, ENGINE, FLEET, OPERATION)


# -- the front of a model: what clients see -------------------------------------------------------------------------


@dataclass(slots=True)
class FrontClassStats:
    """Choices of one service class."""

    first_token: Histogram = histogram(
        "time_to_first_token_seconds",
        "From a request's submission to the first token of each choice, by the engine's clock.",
        Chart(LATENCY, "Time to first token"),
    )
    per_token: Histogram = histogram(
        "time_per_output_token_seconds",
        "From each token of a choice to the next, by the engine's clock.",
        Chart(LATENCY, "Time per output token"),
        start=partial(Histogram, TOKEN_SECONDS),
    )
    in_time: int = counter(
        "answers_in_time",
        "Complete choices that met both latency targets of their class (the time per token on average).",
        Chart(LATENCY, "Choices within their targets", "in time", unit="reqps"),
    )
    late: int = counter(
        "answers_late",
        "Complete choices that missed a latency target of their class.",
        Chart(LATENCY, "Choices within their targets", "late"),
    )
    expired: int = counter(
        "answers_expired",
        "Choices ended by their deadline.",
        Chart(LATENCY, "Choices within their targets", "expired"),
    )


@dataclass(slots=True)
class AdapterStats:
    """Requests with one adapter; a request with several counts for each of them."""

    requests: int = counter(
        "adapter_requests",
        "Requests submitted with an adapter.",
        Chart(REQUESTS, "Requests by adapter", unit="reqps"),
    )
    open_requests: int = gauge(
        "adapter_requests_open",
        "Requests with an adapter, submitted and not ended.",
        Chart(REQUESTS, "Open requests by adapter"),
    )
    prompt_tokens: int = counter(
        "adapter_prompt_tokens",
        "Prompt tokens of requests with an adapter.",
        Chart(TEXT, "Tokens by adapter", "prompts"),
    )
    generated_tokens: int = counter(
        "adapter_generated_tokens",
        "Output tokens of requests with an adapter.",
        Chart(TEXT, "Tokens by adapter", "answers"),
    )


@dataclass
class FrontStats:
    """Statistics of a model as its clients see it. A request has one or more choices, here called answers."""

    finished: Counter[str] = counter(
        "answers",
        "Choices ended, by finish reason.",
        Chart(REQUESTS, "Choices by finish reason", unit="reqps"),
        start=Counter,
        labels=("finish_reason",),
    )
    open_requests: int = gauge(
        "requests_open", "Requests submitted and not ended.", Chart(REQUESTS, "Open requests", by=("model_name",))
    )
    request: Histogram = histogram(
        "request_seconds", "From a request's submission to its last token.", Chart(REQUESTS, "Request time")
    )
    prompt_tokens: int = counter("prompt_tokens", "Prompt tokens.", Chart(TEXT, "Tokens per second", "prompts"))
    cached_tokens: int = counter(
        "cached_prompt_tokens",
        "Prompt tokens taken from the prefix cache.",
        Chart(TEXT, "Tokens per second", "of these cached"),
    )
    generated_tokens: int = counter("generated_tokens", "Output tokens.", Chart(TEXT, "Tokens per second", "answers"))
    prompt_length: Histogram = histogram(
        "request_prompt_tokens",
        "Prompt tokens of a request.",
        Chart(TEXT, "Length of prompts"),
        start=partial(Histogram, TOKENS),
    )
    answer_length: Histogram = histogram(
        "answer_tokens",
        "Output tokens of a choice.",
        Chart(TEXT, "Length of choices"),
        start=partial(Histogram, TOKENS),
    )
    classes: dict[ServiceClass, FrontClassStats] = each(
        "service_class", FrontClassStats, start=lambda: {c: FrontClassStats() for c in ServiceClass}
    )
    adapters: dict[str, AdapterStats] = each("adapter", AdapterStats)
    recent_first: deque[float] = recent(
        "ttft",
        "Seconds to the first token of each of the latest choices.",
        Tile("First token", "median"),
        Tile("First token", "tail", "{}"),
        start=lambda: deque(maxlen=RECENT),
    )
    recent_paces: deque[float] = recent(
        "tpot",
        "Mean seconds between the tokens of each of the latest choices.",
        Tile("Per token", "median"),
        Tile("Per token", "tail", "{}"),
        start=lambda: deque(maxlen=RECENT),
    )


# -- the engine of a model ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Statistics of the sequences of one service class."""

    running: int = gauge("answers_running", "Choices running.", Chart(LATENCY, "Running"))
    waiting: int = gauge("answers_waiting", "Choices waiting in the queue.", Chart(LATENCY, "Waiting"))
    displaced: int = counter(
        "answers_displaced",
        "Choices preempted by a higher class.",
        Chart(KV, "Preemptions", "displaced"),
    )
    queue_seconds: Histogram = histogram(
        "queue_time_seconds",
        "From a choice's arrival in the engine to its first row.",
        Chart(LATENCY, "Time in the queue"),
    )


@dataclass(frozen=True, slots=True)
class TierStats:
    """Statistics of one tier, which keeps evicted blocks in parts, one for each cache group: counts since the start, by
    outcome, and the current state.

    loads: "loaded", or why not: the reasons of kv.tiers.record.Unusable. saves: "saved", or why a part was not saved:
    "known" (the tier has it already), "full" (the queue), "large" (larger than the tier), "slow" (computing it is
    faster than reading it), "dear" (writing would take more than its share of the time), "paused" (after an error),
    "error", "closed".
    """

    loads: dict[str, int] = counter(
        "tier_loads",
        "Parts of blocks requested from a tier, by outcome; `none` counts parts that were requested from no tier.",
        Chart(TIERS, "Loads by outcome"),
        start=dict,
        labels=("outcome",),
    )
    saves: dict[str, int] = counter(
        "tier_saves",
        "Parts of blocks offered to a tier, by outcome.",
        Chart(TIERS, "Saves by outcome"),
        start=dict,
        labels=("outcome",),
    )
    bytes_loaded: int = counter(
        "tier_loaded_bytes", "Bytes read from a tier.", Chart(TIERS, "Bytes per second", "loaded")
    )
    bytes_saved: int = counter(
        "tier_saved_bytes", "Bytes written to a tier.", Chart(TIERS, "Bytes per second", "saved")
    )
    evicted: int = counter(
        "tier_evicted", "Parts evicted from a tier to make room for others.", Chart(TIERS, "Parts evicted")
    )
    read_rate: float = gauge("", "an estimate in bytes per second, for decisions; 0 if unknown", start=float)
    open_loads: int = gauge("", "work in progress: tickets of loads")
    open_bytes: int = gauge("", "work in progress: bytes of the parts of open loads")
    queued_bytes: int = gauge("", "work in progress: bytes waiting to be saved")
    num_parts: int = gauge("", "their bytes are exported")
    num_bytes: int = gauge("tier_bytes", "Bytes in a tier.", Chart(TIERS, "Bytes in tiers", by=("instance", "tier")))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's counters and gauges; totals count from its first start, across restarts after a
    crash."""

    running: int = gauge("", "the sum over the classes, for the page", Tile("Running", "count"))
    waiting: int = gauge("", "the sum over the classes, for the page", Tile("Running", "count", "{} waiting"))
    paused: int = gauge(
        "answers_paused",
        "Choices paused until their clients have read what is buffered.",
        Chart(OPERATION, "Slow readers", "choices paused"),
    )
    pauses: int = counter(
        "answer_pauses",
        "Pauses of a choice for a slow reader.",
        Chart(OPERATION, "Slow readers", "pauses per second"),
    )
    generated_tokens: int = counter(
        "",
        "the front exports the tokens that it delivered",
        Tile("Generated", "rate"),
        Tile("Generated", "count", "{} tokens in all"),
    )
    prompt_tokens: int = counter(
        "",
        "the front exports the tokens that it delivered",
        Tile("Prompts", "rate"),
        Tile("Prompts", "count", "{} tokens in all"),
    )
    blocks_used: int = gauge(
        "kv_usage_ratio",
        "The share of the KV memory that sequences use.",
        Chart(KV, "KV memory in use", by=("instance", "model_name")),
        Tile("KV in use", "share", of="blocks_total"),
        share_of="blocks_total",
    )
    blocks_total: int = gauge("kv_blocks", "Blocks of KV memory.", Chart(KV, "Blocks", "all"))
    blocks_cached: int = gauge(
        "kv_cached_blocks",
        "Blocks that only the prefix cache holds.",
        Chart(KV, "Blocks", "held by the prefix cache only"),
        Tile("KV in use", "share", "{} cached, idle", of="blocks_total"),
    )
    block_size: int = gauge("", "a constant of the engine, in tokens")
    looked_up_tokens: int = counter(
        "prefix_lookup_tokens",
        "Tokens looked up in the prefix cache when a sequence gets its first row.",
    )
    cached_tokens: int = counter(
        "prefix_hit_tokens",
        "Tokens looked up in the prefix cache and found there.",
        Chart(KV, "Prefix cache", "tokens found", per="prefix_lookup_tokens", unit="percentunit"),
        Tile("Prefix hits", "share", of="looked_up_tokens"),
        Tile("Prefix hits", "count", "{} tokens"),
        Tile("Prefix hits", "growth", "{} recently", of="looked_up_tokens"),
    )
    preemptions: int = counter(
        "preemptions",
        "Preemptions of sequences for lack of memory.",
        Chart(KV, "Preemptions", "for lack of memory"),
        Tile("Preemptions", "count"),
    )
    evicted_blocks: int = counter(
        "prefix_evicted_blocks",
        "Blocks evicted from the prefix cache.",
        Chart(KV, "Blocks evicted", "from the prefix cache"),
        Tile("Preemptions", "count", "{} blocks evicted"),
    )
    event_batches: int = counter(
        "kv_event_batches", "Batches of KV cache events published.", Chart(KV, "KV cache events", "published")
    )
    event_batches_dropped: int = counter(
        "kv_event_batches_dropped", "Batches that a slow subscriber missed.", Chart(KV, "KV cache events", "dropped")
    )
    classes: dict[ServiceClass, ClassStats] = each("service_class", ClassStats)
    tiers: dict[str, TierStats] = each("tier", TierStats)  # by tier: "host", "disk", "peer"
    tier_unused: dict[str, int] = counter(
        "tier_loads",
        "",  # part of tier_loads that no tier counts: "late", "slow"
        start=dict,
        labels=("tier", "outcome"),
        above=("none",),
    )
    tier_bytes: int = gauge("", "each tier exports its own", Tile("Tier", "bytes", optional=True))
    tier_loaded_tokens: int = counter(
        "tier_hit_tokens",
        "Tokens read from tiers, for hits of the prefix cache and for resumed sequences.",
        Chart(TIERS, "Tokens loaded", "tokens"),
        Tile("Tier", "count", "{} tokens read back", optional=True),
    )
    tier_loads: dict[str, int] = counter("", "each tier exports its own", start=dict)
    tier_saves: dict[str, int] = counter("", "each tier exports its own", start=dict)
    tier_bytes_loaded: int = counter("", "each tier exports its own")
    tier_bytes_saved: int = counter("", "each tier exports its own")
    tier_queued_bytes: int = gauge("", "work in progress: bytes waiting to be saved")
    tier_evicted: int = counter("", "each tier exports its own")
    blocks_sent: dict[str, int] = counter(
        "blocks_sent_parts", "Parts of blocks for other engines, by outcome: sent, refused there, or dropped here.",
        Chart(TIERS, "Parts for other engines by outcome"), start=dict, labels=("outcome",),
    )  # fmt: skip
    blocks_sent_bytes: int = counter("blocks_sent_bytes", "Bytes that other engines have taken.", Chart(TIERS, "Sent"))
    masked_rows: int = counter(
        "masked_rows",
        "Tokens sampled under the mask of a grammar.",
        Chart(TEXT, "Tokens under grammars", "sampled under a mask"),
    )
    forced_tokens: int = counter(
        "forced_tokens",
        "Tokens forced by a grammar and appended without a step each.",
        Chart(TEXT, "Tokens under grammars", "forced"),
    )
    drafted_tokens: int = counter(
        "drafted_tokens",
        "Ids proposed by drafters and checked in steps.",
        Chart(TEXT, "Drafts", "proposed"),
    )
    accepted_tokens: int = counter(
        "accepted_draft_tokens",
        "Ids proposed by drafters that were right.",
        Chart(TEXT, "Drafts", "accepted"),
        Tile("Drafts", "share", of="drafted_tokens", optional=True),
        Tile("Drafts", "count", "{} tokens accepted", optional=True),
    )
    drafted_at: dict[int, int] = counter(
        "draft_position_drafted",
        "Drafted ids, by position in their draft.",
        start=dict,
        labels=("position",),
    )
    accepted_at: dict[int, int] = counter(
        "draft_position_accepted",
        "Drafted ids that were right, by position in their draft.",
        Chart(TEXT, "Drafts accepted by position", by=("position",), per="draft_position_drafted"),
        start=dict,
        labels=("position",),
    )
    draft_seconds_saved: float = gauge(
        "draft_seconds_saved",
        "Estimated time of steps that accepted drafts have saved, less that of checking drafts.",
        Chart(TEXT, "Time saved by drafts", by=("model_name",)),
        start=float,
    )
    adapters_registered: int = gauge(
        "adapters_registered", "Adapters that requests may name.", Chart(ENGINE, "Adapters", "registered")
    )
    adapters_resident: int = gauge(
        "adapters_resident", "Adapters in memory, those that load included.", Chart(ENGINE, "Adapters", "in memory")
    )
    adapters_bytes: int = gauge(
        "adapters_bytes", "Bytes of the adapters in memory.", Chart(ENGINE, "Bytes of adapters", by=("model_name",))
    )
    adapters_running: dict[str, int] = gauge(
        "adapter_answers_running",
        "Choices running with an adapter.",
        Chart(ENGINE, "Choices by adapter", "running"),
        start=dict,
        labels=("adapter",),
    )
    adapters_waiting: dict[str, int] = gauge(
        "adapter_answers_waiting",
        "Choices with an adapter in the queue.",
        Chart(ENGINE, "Choices by adapter", "waiting"),
        start=dict,
        labels=("adapter",),
    )
    adapters_loads: int = counter(
        "adapters_loads", "Adapters loaded into memory.", Chart(ENGINE, "Loads of adapters", "loads")
    )
    adapters_evictions: int = counter(
        "adapters_evictions",
        "Adapters evicted from memory to make room for others.",
        Chart(ENGINE, "Loads of adapters", "evictions"),
    )
    adapters_load_seconds: Histogram = histogram(
        "adapters_load_seconds",
        "From the beginning of an adapter's load until requests can join with it.",
        Chart(ENGINE, "Time of a load of an adapter"),
    )
    steps: int = counter("engine_steps", "Steps computed.", Chart(ENGINE, "Steps per second", by=("model_name",)))
    computed_tokens: int = counter(
        "engine_computed_tokens",
        "Tokens computed in steps, including tokens recomputed after preemption.",
        Chart(ENGINE, "Tokens of a step", "tokens", per="engine_steps"),
    )
    step_seconds: float = counter(
        "engine_step_seconds",
        "Time spent in steps.",
        Chart(ENGINE, "Time of a step", "step", per="engine_steps"),
        start=float,
    )
    kernel_seconds: float = counter(
        "engine_kernel_seconds",
        "Time of steps inside native programs; 0 with other executors.",
        Chart(ENGINE, "Time of a step", "in kernels", per="engine_steps"),
        start=float,
    )
    weights_read_bytes: int = counter(
        "engine_weights_read_bytes",
        "Bytes of weights read from disk for steps, of a model that does not fit into memory.",
        Chart(ENGINE, "Weights read from disk", by=("model_name",), unit="Bps"),
    )
    weights_wait_seconds: float = counter(
        "engine_weights_wait_seconds",
        "Time that steps waited for weights from disk.",
        Chart(ENGINE, "Time of a step", "waiting for weights", per="engine_steps"),
        start=float,
    )
    finished: int = counter(
        "engine_answers_finished",
        "Choices ended in the engine. One that moves from a replica to another ends in both.",
        Chart(ENGINE, "Choices ended in the engine", "all", unit="reqps"),
    )
    aborted: int = counter(
        "engine_answers_aborted",
        "Choices ended in the engine because the client disconnected, or the server cancelled or moved them.",
        Chart(ENGINE, "Choices ended in the engine", "aborted"),
    )
    backlog_tokens: int = gauge(
        "prompt_backlog_tokens",
        "Tokens of waiting and running choices that are to be computed before they generate.",
        Chart(ENGINE, "Prompt tokens to compute", by=("model_name",)),
    )
    prefill_token_seconds: float = gauge("", "a measured cost, for routing", start=float)
    decode_row_seconds: float = gauge("", "a measured cost, for routing", start=float)
    key_seconds: float = gauge("", "a measured cost, for routing", start=float)
    step_overhead_seconds: float = gauge("", "a measured cost, for routing", start=float)
    max_rows: int = gauge("", "a constant of the engine, in choices")
    chunk_tokens: int = gauge("", "a constant of the engine, in tokens")
    replicas: dict[str, ReplicaStats] = each("replica", ReplicaStats)  # of a fleet, by index
    pid: int = gauge("", "of the engine's process")


def table() -> Iterator[StatisticRow]:
    """All statistics with the names of their labels."""
    yield from rows(HttpStats)
    yield from rows(BatchStats)
    yield from rows(FrontStats, ("model_name",))
    yield from rows(EngineStats, ("model_name",))


def counted(*owners: object) -> dict[str, Any]:
    """The counters of EngineStats that the owners have as attributes of the same names."""
    names = [of.name for of in fields(EngineStats) if getattr(of.metadata[STATISTIC], "kind", "") == "counter"]
    found = {name: getattr(owner, name) for owner in reversed(owners) for name in names if hasattr(owner, name)}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in found.items()}


def by_adapter(names: Iterable[str]) -> dict[str, int]:
    """How often each of these names of adapters occurs; the rarest together, if there are too many for a label."""
    counts = Counter(names)
    found = dict(counts.most_common(MOST_ADAPTERS))
    if rest := counts.total() - sum(found.values()):
        found[OTHER_ADAPTERS] = rest
    return found
