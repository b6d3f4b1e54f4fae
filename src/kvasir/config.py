"""The options of an engine, their checks, the facts of a model and a machine, and what `resolve` decides from these.

Users give `EngineOptions` (None means: decide automatically). `kvasir.resolve` combines them with the facts into an
`EngineConfig`, which is printed at the start. Packages receive single values of it, not the whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvasir.adapters import parse_adapters
from kvasir.errors import ConfigError
from kvasir.memory import Footprint
from kvasir.plan import CacheGroup
from kvasir.speculation import MAX_DRAFTED, Drafters, check_own, parse
from kvasir.types import ServiceClass, Target

GIB = 1 << 30
DTYPES = ("auto", "float32", "bfloat16", "float16")
ROLES = ("both", "prefill", "decode")
KV_DTYPES = (*DTYPES, "int8", "fp8")
EXECUTORS = ("auto", "program", "graph", "eager")
RANKS = (1, 2, 4, 8)
MAX_STAGES = 16
EVICTIONS = ("lru", "lfu", "fifo", "priority")


def option(default: Any, help: str, *flags: str, hidden: bool = False, unit: str = "") -> Any:
    """A field of an option group: command-line flags are made from its help (`flags` if the name is not enough).
    hidden: whether --help leaves it out. unit: bytes, tokens or format, if its values have short forms there (8GB, 4k,
    bf16)."""
    return field(default=default, metadata={"help": help, "flags": flags, "hidden": hidden, "unit": unit})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """A user's options for an engine; None means: decide automatically. Sizes are in tokens unless stated as bytes."""

    model: str
    served_model_name: str | None = option(None, "Name of the model in the API (default: as given).")
    tokenizer: str | None = option(None, "Folder or GGUF file to take the tokenizer from (default: the model's).")
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    dtype: str = option("auto", "Arithmetic: auto, float32, bfloat16 (bf16) or float16 (fp16).", unit="format")
    kv_dtype: str = option(
        "auto", "Keys and values: auto (as dtype), float32, bfloat16, float16, int8 or fp8.", unit="format"
    )
    device: str = option("auto", "Where to compute: auto, cpu or cuda.")
    max_model_len: int | None = option(
        None,
        "Maximum context in tokens, such as 4k (default: what model and memory allow).",
        *("--max-model-len", "--ctx-size", "-c", "--context-length"),
        unit="tokens",
    )
    max_num_seqs: int = option(
        64, "Maximum sequences per step.", "--max-num-seqs", "--parallel", "-np", "--max-running-requests"
    )
    max_num_batched_tokens: int | None = option(
        None, "Maximum tokens per step (default: 512, CUDA and streamed weights 2048).", unit="tokens"
    )
    max_chunk: int | None = option(
        None, "Maximum prompt tokens of one sequence per step (default: no extra limit).", unit="tokens"
    )
    block_size: int = option(64, "Tokens in a block of the KV cache: 8, 16, 32, 64 or 128.")
    kv_memory: int | None = option(
        None, "KV cache size, such as 8GB (default: a share of the free memory).", unit="bytes"
    )
    num_blocks: int | None = option(None, "KV cache size in blocks; for experiments.")
    memory_fraction: float | None = option(
        None, "Share of the free memory for the KV cache (CPU 0.5, CUDA and streamed weights 0.9)."
    )
    weights_memory: int | None = option(
        None,
        "Memory for the weights, such as 8GB; layers that do not fit are read from disk in each step (CPU; default: "
        "all, or half of the free memory if that is too little).",
        unit="bytes",
    )
    threads: int | None = option(None, "Computing threads (default: the physical cores).", "--threads", "-t")
    overlap: bool | None = option(None, "Plan a step while another runs (default: if a core is free for it).")
    pin: bool = option(False, "Pin each computing thread to its own core.")
    tensor_parallel: int = option(
        1,
        "Processes that share the model on this machine, each with its part of every matrix and of the threads: 1, 2, "
        "4 or 8. The answers are the same.",
        *("--tensor-parallel", "--tensor-parallel-size", "-tp", "--tp", "--tp-size"),
    )
    pipeline_parallel: int = option(
        1,
        "Stages that divide the model's layers on this machine, each in a process, or in as many as there are ranks. "
        "The answers are the same.",
        *("--pipeline-parallel", "--pipeline-parallel-size", "-pp"),
    )
    expert_parallel: bool = option(
        False,
        "Refuse to start if there are too few experts to give each rank some, as ranks do by default.",
        *("--expert-parallel", "--enable-expert-parallel"),
    )
    prefix_cache: bool = option(True, "Reuse computed prefixes across requests.")
    cache_eviction: str = option("lru", "Eviction policy of the prefix cache: lru, lfu, fifo or priority.")
    cache_host: int | None = option(
        None,
        "Bytes of host memory for prefixes evicted from a GPU; 0 for none (default: half of the free memory).",
        unit="bytes",
    )
    cache_dir: str | None = option(None, "Folder for prefixes evicted from memory; they survive restarts.")
    cache_disk: int | None = option(None, "Maximum bytes in this folder (default: 16 GiB).", unit="bytes")
    cache_write_share: float | None = option(
        None, "Share of the computing time for writes to it; 1: no bound (default: CPU 0.03, CUDA 1)."
    )
    cache_offer: str | None = option(
        None, "Where other engines reach the prefixes in cache_dir: HOST:PORT, or a socket file (a path with a slash)."
    )
    cache_peer: str | None = option(
        None, "Where another engine offers its prefixes: HOST:PORT, or a socket file (a path with a slash)."
    )
    role: str = option(
        "both",
        "What this engine exchanges blocks of prompts for: prefill (sends them), decode (takes them) or both.",
        *("--role", "--disaggregation-mode"),
    )
    transfer_listen: str | None = option(
        None, "Where other engines reach this one for blocks: HOST:PORT, or a socket file (a path with a slash)."
    )
    transfer_peer: list[str] | None = option(  # noqa: RUF009 - what `option` makes is a field
        None, "Address that this engine may connect to for blocks: HOST, HOST:PORT or a path (repeatable)."
    )
    transfer_key: str | None = option(None, "File with the key that engines exchanging blocks share.")
    transfer_cert: str | None = option(None, "PEM file with this engine's certificate and private key, for TCP.")
    transfer_ca: str | None = option(None, "PEM file of CAs of other engines' certificates (default: --transfer-cert).")
    transfer_memory: int | None = option(None, "Bytes of blocks on their way (default: at most 2 GiB).", unit="bytes")
    speculate: str = option(
        "auto",
        "Drafters that guess ids, which never changes an answer: auto, off, or of ngram, suffix, draft=MODEL, "
        "eagle3=PATH, dflash=PATH, mtp.",
        "--speculate",
        "--spec-type",
    )
    draft_max: int = option(
        MAX_DRAFTED,
        "Most drafted ids of a sequence in a step.",
        "--draft-max",
        "--spec-draft-n-max",
        "--draft",
        "--draft-n",
    )
    draft_dtype: str | None = option(
        None, "Arithmetic of a drafter's own weights (default: as --dtype).", unit="format"
    )
    draft_quantize: str | None = option(
        None, "Quantize a drafter's float weights while loading: q8, q4 or none (default: as --quantize)."
    )
    draft_max_model_len: int | None = option(
        None,
        "Positions of a sequence up to which a drafter with weights guesses (default: all that it can).",
        unit="tokens",
    )
    lora: list[str] | None = option(  # noqa: RUF009 - what `option` makes is a field
        None,
        "Adapter as NAME=PATH, which requests select by its name; a path alone applies to all others (repeatable).",
        *("--lora", "--lora-scaled"),
    )
    max_loras: int = option(64, "Adapters in use at once, and so in one step.", "--max-loras", "--max-loras-per-batch")
    max_cpu_loras: int | None = option(
        None, "Adapters in memory, in use or kept for later requests (default: as many as --max-loras)."
    )
    max_lora_rank: int | None = option(None, "Greatest rank of an adapter (default: any).")
    lora_memory: int | None = option(
        None, "Bytes of adapters in memory (default: a quarter of what stays free).", unit="bytes"
    )
    jump_ahead: bool = option(True, "Append ids that a grammar forces without a step each; the output is the same.")
    max_waiting: int = option(1024, "Choices that may wait before new requests are refused with 429.")
    slo_interactive: str = option(
        "2000/100", "Latency targets of interactive requests: ms to the first token / per output token."
    )
    slo_batch: str = option("30000/500", "Latency targets of batch requests.")
    slo_background: str = option("600000/5000", "Latency targets of background requests.")
    chat_template: str | None = option(None, "File with a chat template to use instead of the model's.")
    trust_special_tokens: bool = option(
        False, "Parse control tokens in chat messages as such. Unsafe with untrusted clients."
    )
    executor: str = option(
        "auto", "auto (program on the CPU, graph on a GPU, eager if that cannot run), program, graph, or eager."
    )
    quantize: str | None = option(None, "Quantize float weights while loading: q8 or q4.")
    rope_scaling: str | None = option(None, "Rope settings in place of the model's, as JSON: kind, factor, lengths.")
    hf_overrides: str | None = option(None, "Fields in place of those in the model's config.json, as a JSON object.")
    host_share: float = 1.0  # fraction of the memory that an engine takes by default, if several share a machine
    loads_adapters: bool = False  # whether clients may load adapters while the engine runs

    @property
    def expects_adapters(self) -> bool:
        """Whether the engine makes room for adapters before the first one is loaded."""
        return bool(self.lora) or self.loads_adapters


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a loaded model for `resolve`. groups: its cache groups. footprint(tokens): the memory that steps of
    this many tokens need. short_until: the longest context for LongRoPE's short factors, 0 without LongRoPE. streams:
    whether weights are read from disk in each step."""

    max_positions: int
    dtype: str
    bidirectional: bool
    groups: tuple[CacheGroup, ...]
    executor: str = "eager"
    notes: tuple[str, ...] = ()
    footprint: Callable[[int], Footprint] = lambda tokens: Footprint()
    short_until: int = 0
    streams: bool = False

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of a block over all layers, one number per cache group."""
        return tuple(group.bytes_per_block for group in self.groups)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The facts of the machine for `resolve`. memory_available: bytes, within the cgroup's limit, that are free once
    the weights are loaded. threads: number of computing threads. processors: number of processors that this process may
    run on. host_available: free bytes of host memory, if the device has memory of its own."""

    kind: str
    memory_available: int
    threads: int
    processors: int = 1
    host_available: int = 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every value that the engine runs with. `notes`: decisions and their reasons, for users."""

    model: str
    served_model_name: str
    dtype: str
    kv_dtype: str
    device: str
    executor: str
    threads: int  # of each rank
    overlap: bool
    pin: bool
    tensor_parallel: int
    pipeline_parallel: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk: int
    block_size: int
    num_blocks: tuple[int, ...]
    kv_bytes: int
    kv_share: float  # of what max_num_seqs sequences of full length use
    max_waiting: int
    jump_ahead: bool
    drafters: Drafters
    draft_max: int
    draft_max_model_len: int | None
    prefix_cache: bool
    cache_eviction: str
    cache_host: int
    cache_dir: str | None
    cache_disk: int
    cache_write_share: float
    cache_offer: str | None
    cache_peer: str | None
    role: str
    exchanges: bool  # blocks with other engines
    transfer_bytes: int  # of blocks on their way, in each direction
    load_bytes: int  # bytes that may be in flight from a tier, if there is one
    save_bytes: int  # bytes that may wait to be written to it
    footprint: Footprint
    memory_left: int  # bytes of the device's memory that stay free
    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int | None
    lora_memory: int  # bytes of adapters in memory, of `memory_left`
    targets: dict[ServiceClass, Target]
    expects_adapters: bool = False  # whether the executor makes room for them at the start
    long_rope: bool = False  # whether LongRoPE's long factors apply
    notes: tuple[str, ...] = ()


def check(options: EngineOptions) -> None:
    """Refuses values that can never work, before the model is read. Raises ConfigError."""

    def at_least(name: str, low: int) -> None:
        value = getattr(options, name)
        if value is not None and value < low:
            raise ConfigError(f"{name} is {value}", f"expected at least {low}")

    lengths = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_chunk")
    for name in (*lengths, "threads", "max_waiting", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_memory"):
        at_least(name, 1)
    at_least("num_blocks", 2)
    at_least("kv_memory", 1)
    at_least("weights_memory", 1)
    at_least("cache_disk", 1)
    at_least("cache_host", 0)
    at_least("transfer_memory", 1)
    _check_cache(options)
    _check_transfer(options)
    if options.dtype not in DTYPES or options.kv_dtype not in KV_DTYPES:
        raise ConfigError(
            f"dtype {options.dtype!r}, kv dtype {options.kv_dtype!r}",
            f"expected one of {', '.join(DTYPES)}; kv_dtype may also be int8 or fp8",
        )
    if options.block_size not in (8, 16, 32, 64, 128):
        raise ConfigError(f"block_size is {options.block_size}", "expected 8, 16, 32, 64 or 128")
    if options.executor not in EXECUTORS:
        raise ConfigError(f"executor is {options.executor!r}", f"expected one of {', '.join(EXECUTORS)}")
    _check_ranks(options)
    if options.cache_eviction not in EVICTIONS:
        raise ConfigError(f"cache_eviction is {options.cache_eviction!r}", f"expected one of {', '.join(EVICTIONS)}")
    if options.memory_fraction is not None and not 0 < options.memory_fraction <= 1:
        raise ConfigError(f"memory_fraction is {options.memory_fraction}", "expected a number in (0, 1]")
    if not 1 <= options.draft_max <= MAX_DRAFTED:
        raise ConfigError(f"draft_max is {options.draft_max}", f"expected 1 to {MAX_DRAFTED}; --speculate off for none")
    if options.draft_dtype is not None and options.draft_dtype not in DTYPES:
        raise ConfigError(f"draft_dtype is {options.draft_dtype!r}", f"expected one of {', '.join(DTYPES)}")
    own = options.draft_dtype, options.draft_quantize, options.draft_max_model_len
    check_own(parse(options.speculate), *own)
    parse_adapters(options.lora or ())
    slo_targets(options)


def _check_ranks(options: EngineOptions) -> None:
    """Refuses what ranks and stages cannot do. Raises ConfigError."""
    size, stages = options.tensor_parallel, options.pipeline_parallel
    if size not in RANKS:
        raise ConfigError(f"tensor_parallel is {size}", "expected 1, 2, 4 or 8: these keep the order of sums")
    if not 1 <= stages <= MAX_STAGES:
        raise ConfigError(f"pipeline_parallel is {stages}", f"expected 1 to {MAX_STAGES}")
    if size == 1 and options.expert_parallel:
        raise ConfigError("expert_parallel without ranks", "set their number with --tensor-parallel")
    if size == stages == 1:
        return
    used, flag = ("ranks", "--tensor-parallel") if size > 1 else ("stages", "--pipeline-parallel")
    if sys.platform != "linux":
        raise ConfigError(f"{used} need Linux: they meet in shared memory", f"leave {flag} out")
    if options.executor == "eager":
        raise ConfigError(f"the eager executor has no {used}", f"leave {flag} or --executor out")
    if stages > 1 and (options.executor == "graph" or options.device == "cuda"):
        raise ConfigError(
            "stages are for the program executor on the CPU",
            "leave --pipeline-parallel, or --executor and --device, out",
        )


def _check_cache(options: EngineOptions) -> None:
    """Refuses options of the prefix cache and its tiers that need others. Raises ConfigError."""
    if options.cache_host and not options.prefix_cache:
        raise ConfigError("cache_host needs the prefix cache", "leave --no-prefix-cache out")
    if options.cache_disk and not options.cache_dir:
        raise ConfigError("cache_disk without cache_dir", "set the folder with --cache-dir")
    if options.cache_write_share is not None and not 0 < options.cache_write_share <= 1:
        raise ConfigError(f"cache_write_share is {options.cache_write_share}", "expected a number in (0, 1]")
    if options.cache_write_share is not None and not options.cache_dir:
        raise ConfigError("cache_write_share without cache_dir", "set the folder with --cache-dir")
    if options.cache_dir and not options.prefix_cache:
        raise ConfigError("cache_dir needs the prefix cache", "leave --no-prefix-cache out")
    if options.cache_peer and not options.prefix_cache:
        raise ConfigError("cache_peer needs the prefix cache", "leave --no-prefix-cache out")
    if options.cache_offer and not options.cache_dir:
        raise ConfigError("cache_offer without cache_dir", "set the folder with --cache-dir")
    if options.cache_offer and options.cache_offer == options.cache_peer:
        raise ConfigError("cache_offer and cache_peer are the same address", "an engine cannot be its own peer")


def exchanges(options: EngineOptions) -> bool:
    """Whether the engine exchanges blocks with others."""
    return bool(options.transfer_listen or options.transfer_peer)


def _check_transfer(options: EngineOptions) -> None:
    """Refuses options of block exchange that need others. Raises ConfigError."""
    if options.role not in ROLES:
        raise ConfigError(f"role is {options.role!r}", f"expected one of {', '.join(ROLES)}")
    if exchanges(options):
        if not options.prefix_cache:
            raise ConfigError("blocks are exchanged through the prefix cache", "leave --no-prefix-cache out")
        return
    credentials = () if options.cache_offer or options.cache_peer else ("transfer_key", "transfer_cert", "transfer_ca")
    for name in ("role", "transfer_memory", *credentials):
        if getattr(options, name) not in (None, "both"):
            raise ConfigError(
                f"{name} is given, and this engine exchanges blocks with no other",
                "give --transfer-listen or --transfer-peer",
            )


def slo_targets(options: EngineOptions) -> dict[ServiceClass, Target]:
    """The targets of all classes, in seconds. Raises ConfigError."""
    return {c: _target(f"slo_{c.value}", getattr(options, f"slo_{c.value}")) for c in ServiceClass}


def _target(name: str, text: str) -> Target:
    """Parses a target from "TTFT/TPOT" in milliseconds. Raises ConfigError."""
    try:
        ttft, tpot = (float(part) / 1000 for part in text.split("/"))
    except ValueError:
        ttft = tpot = 0.0
    if not (0 < ttft < math.inf and 0 < tpot < math.inf):
        raise ConfigError(f"{name} is {text!r}", "expected two positive numbers of milliseconds, like 2000/100")
    return Target(ttft, tpot)
