"""Options by package, the reader of the environment, and `resolve`: the engine's decisions, complete and frozen.

Users give `EngineOptions` (None means: decide automatically). `resolve` combines them with the facts of the model and
of the machine into an `EngineConfig`, which is printed at the start. Packages receive single values of it, not the
whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.errors import ConfigError
from kvasir.memory import HEADROOM, QUEUE_BYTES, Footprint
from kvasir.plan import CacheGroup
from kvasir.speculation import MAX_DRAFTED, Drafters, parse
from kvasir.types import ServiceClass, Target

GIB = 1 << 30
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "fp8")
EXECUTORS = ("auto", "program", "graph", "eager")
EVICTIONS = ("lru", "lfu", "fifo", "priority")


def option(default: Any, help: str, *flags: str) -> Any:
    """A field of an option group: command-line flags are made from its help (`flags` if the name is not enough)."""
    return field(default=default, metadata={"help": help, "flags": flags})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """A user's options for an engine; None means: decide automatically. Sizes are in tokens unless stated as bytes."""

    model: str
    served_model_name: str | None = option(None, "Name of the model in the API (default: as given).")
    tokenizer: str | None = option(None, "Folder or GGUF file to take the tokenizer from (default: the model's).")
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    dtype: str = option("auto", "Arithmetic of the weights: auto, float32, bfloat16 or float16.")
    kv_dtype: str = option("auto", "Keys and values: auto (as dtype), float32, bfloat16, float16, int8 or fp8.")
    device: str = option("auto", "Where to compute: auto, cpu or cuda.")
    max_model_len: int | None = option(None, "Maximum context in tokens (default: what model and memory allow).")
    max_num_seqs: int = option(64, "Maximum sequences per step.")
    max_num_batched_tokens: int | None = option(None, "Maximum tokens per step (default: 512, CUDA 2048).")
    max_chunk: int | None = option(None, "Maximum prompt tokens of one sequence per step (default: no extra limit).")
    block_size: int = option(64, "Tokens in a block of the KV cache: 8, 16, 32, 64 or 128.")
    kv_memory: int | None = option(None, "KV cache size in bytes (default: a share of the free memory).")
    num_blocks: int | None = option(None, "KV cache size in blocks; for experiments.")
    memory_fraction: float | None = option(None, "Share of the free memory for the KV cache (CPU 0.5, CUDA 0.9).")
    threads: int | None = option(None, "Computing threads (default: the physical cores).")
    overlap: bool | None = option(None, "Plan a step while another runs (default: if a core is free for it).")
    pin: bool = option(False, "Pin each computing thread to its own core.")
    prefix_cache: bool = option(True, "Reuse computed prefixes across requests.")
    cache_eviction: str = option("lru", "Eviction policy of the prefix cache: lru, lfu, fifo or priority.")
    cache_host: int | None = option(
        None,
        "Bytes of host memory for prefixes evicted from a GPU; 0 for none (default: half of the free memory).",
    )
    cache_dir: str | None = option(None, "Folder for prefixes evicted from memory; they survive restarts.")
    cache_disk: int | None = option(None, "Maximum bytes in this folder (default: 16 GiB).")
    cache_write_share: float | None = option(
        None, "Share of the computing time for writes to it; 1: no bound (default: CPU 0.03, CUDA 1)."
    )
    cache_offer: str | None = option(
        None, "Socket that serves the prefixes in cache_dir to other engines of this user."
    )
    cache_peer: str | None = option(None, "Socket of another engine to load prefixes from.")
    speculate: str = option(
        "auto",
        "Drafters that guess ids, which never changes an answer: auto, off, or of ngram, suffix, draft=MODEL, "
        "eagle3=PATH, mtp.",
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
        "auto", "auto (program if it can run, else eager), program, eager, or graph (on a GPU; not yet run on one)."
    )
    quantize: str | None = option(None, "Quantize float weights while loading: q8 or q4.")
    rope_scaling: str | None = option(None, "Rope settings in place of the model's, as JSON: kind, factor, lengths.")
    hf_overrides: str | None = option(None, "Fields in place of those in the model's config.json, as a JSON object.")
    host_share: float = 1.0  # fraction of the host memory that an engine takes by default, if several share a machine


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a loaded model for `resolve`. groups: its cache groups. footprint(tokens): the memory that steps of
    this many tokens need. short_until: the longest context for LongRoPE's short factors, 0 without LongRoPE."""

    max_positions: int
    dtype: str
    bidirectional: bool
    groups: tuple[CacheGroup, ...]
    executor: str = "eager"
    notes: tuple[str, ...] = ()
    footprint: Callable[[int], Footprint] = lambda tokens: Footprint()
    short_until: int = 0

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
    threads: int
    overlap: bool
    pin: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk: int
    block_size: int
    num_blocks: tuple[int, ...]
    kv_bytes: int
    max_waiting: int
    jump_ahead: bool
    drafters: Drafters
    draft_max: int
    prefix_cache: bool
    cache_eviction: str
    cache_host: int
    cache_dir: str | None
    cache_disk: int
    cache_write_share: float
    cache_offer: str | None
    cache_peer: str | None
    load_bytes: int  # bytes that may be in flight from a tier, if there is one
    save_bytes: int  # bytes that may wait to be written to it
    footprint: Footprint
    memory_left: int  # bytes of the device's memory that stay free
    targets: dict[ServiceClass, Target]
    long_rope: bool = False  # whether LongRoPE's long factors apply
    notes: tuple[str, ...] = ()


def check(options: EngineOptions) -> None:
    """Refuses values that can never work, before the model is read. Raises ConfigError."""

    def at_least(name: str, low: int) -> None:
        value = getattr(options, name)
        if value is not None and value < low:
            raise ConfigError(f"{name} is {value}", f"expected at least {low}")

    for name in (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_chunk",
        "threads",
        "max_waiting",
    ):
        at_least(name, 1)
    at_least("num_blocks", 2)
    at_least("kv_memory", 1)
    at_least("cache_disk", 1)
    at_least("cache_host", 0)
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
        raise ConfigError("cache_offer and cache_peer are the same socket", "an engine cannot be its own peer")
    if options.dtype not in DTYPES or options.kv_dtype not in KV_DTYPES:
        raise ConfigError(
            f"dtype {options.dtype!r}, kv dtype {options.kv_dtype!r}",
            f"expected one of {', '.join(DTYPES)}; kv_dtype may also be int8 or fp8",
        )
    if options.block_size not in (8, 16, 32, 64, 128):
        raise ConfigError(f"block_size is {options.block_size}", "expected 8, 16, 32, 64 or 128")
    if options.executor not in EXECUTORS:
        raise ConfigError(f"executor is {options.executor!r}", f"expected one of {', '.join(EXECUTORS)}")
    if options.cache_eviction not in EVICTIONS:
        raise ConfigError(f"cache_eviction is {options.cache_eviction!r}", f"expected one of {', '.join(EVICTIONS)}")
    if options.memory_fraction is not None and not 0 < options.memory_fraction <= 1:
        raise ConfigError(f"memory_fraction is {options.memory_fraction}", "expected a number in (0, 1]")
    if not 1 <= options.draft_max <= MAX_DRAFTED:
        raise ConfigError(f"draft_max is {options.draft_max}", f"expected 1 to {MAX_DRAFTED}; --speculate off for none")
    parse(options.speculate)
    slo_targets(options)


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


def resolve(options: EngineOptions, model: ModelFacts, device: DeviceFacts) -> EngineConfig:
    """Combines options and facts. Raises ConfigError if they contradict each other."""
    check(options)
    notes = list(model.notes)
    length = options.max_model_len or model.max_positions
    if length > model.max_positions:
        raise ConfigError(
            f"max_model_len {length} is beyond the {model.max_positions} positions of the model", "lower it"
        )
    batched = options.max_num_batched_tokens or (2048 if device.kind == "cuda" else 512)
    if model.bidirectional:
        _refuse_parts(options, length)
        if batched < length:
            notes.append(f"a step holds {length} tokens, and this model computes a whole text in one step")
            batched = length
    kv_dtype = _kv_dtype(options.kv_dtype, model.dtype)
    footprint = model.footprint(batched)
    num_blocks, length, kv_bytes = _size_pools(options, model, device, footprint, length, batched, notes)
    left = device.memory_available - footprint.to_come(length) - kv_bytes
    load_bytes, save_bytes = _queues(options, device, left, kv_bytes, max(model.bytes_per_block))
    return EngineConfig(
        model=options.model,
        served_model_name=options.served_model_name or options.model,
        dtype=model.dtype,
        kv_dtype=kv_dtype,
        device=device.kind,
        executor=model.executor,
        threads=options.threads or device.threads,
        overlap=_overlap(options, device),
        pin=options.pin,
        max_model_len=length,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=batched,
        max_chunk=min(options.max_chunk or batched, batched),
        block_size=options.block_size,
        num_blocks=num_blocks,
        kv_bytes=kv_bytes,
        max_waiting=options.max_waiting,
        jump_ahead=options.jump_ahead,
        drafters=parse(options.speculate),
        draft_max=options.draft_max,
        prefix_cache=options.prefix_cache,
        cache_eviction=options.cache_eviction,
        cache_host=_cache_host(options, device),
        cache_dir=options.cache_dir,
        cache_disk=options.cache_disk or 16 * GIB,
        cache_write_share=options.cache_write_share or (0.03 if device.kind == "cpu" else 1.0),
        cache_offer=options.cache_offer,
        cache_peer=options.cache_peer,
        load_bytes=load_bytes,
        save_bytes=save_bytes,
        footprint=footprint,
        memory_left=left - (load_bytes + save_bytes) * (device.kind == "cpu" and _has_tier(options)),
        targets=slo_targets(options),
        long_rope=_long_rope(model, length, notes),
        notes=tuple(notes),
    )


def _refuse_parts(options: EngineOptions, length: int) -> None:
    """Raises ConfigError for an option that would split texts, which a bidirectional model must compute whole."""
    if options.max_chunk or (options.max_num_batched_tokens or length) < length:
        raise ConfigError(
            f"this model computes whole texts in one step, up to {length} tokens",
            "leave max_chunk out; raise max_num_batched_tokens to this length, or lower max_model_len",
        )


def _cache_host(options: EngineOptions, device: DeviceFacts) -> int:
    """Bytes of the host tier. Raises ConfigError if the pool itself is host memory, or if more is requested than is
    free."""
    if device.kind == "cpu" and options.cache_host:
        raise ConfigError(
            "cache_host applies to devices with their own memory; on the CPU the KV cache is in host memory already",
            "leave it out and raise kv_memory",
        )
    if device.kind == "cpu" or not options.prefix_cache:
        return 0
    if options.cache_host is None:
        return int(device.host_available // 2 * options.host_share)
    if options.cache_host > device.host_available:
        raise ConfigError(
            f"cache_host is {options.cache_host} bytes, of the host's memory {device.host_available} are free",
            "lower it",
        )
    return options.cache_host


def _overlap(options: EngineOptions, device: DeviceFacts) -> bool:
    if options.overlap is not None:
        return options.overlap
    return device.kind == "cuda" or device.processors > (options.threads or device.threads)


def _long_rope(model: ModelFacts, length: int, notes: list[str]) -> bool:
    """The served context alone decides, never a prompt's length: prompts of any length then share prefixes."""
    is_long = length > model.short_until > 0
    if model.short_until:
        other = f"--max-model-len {'up to' if is_long else 'beyond'} {model.short_until} selects the others"
        notes.append(f"LongRoPE uses its {'long' if is_long else 'short'} factors for this context; {other}")
    return is_long


def _kv_dtype(wish: str, dtype: str) -> str:
    return dtype if wish == "auto" else wish


def _queues(options: EngineOptions, device: DeviceFacts, left: int, kv_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Bytes that may be in flight from a tier and to a tier; at least one block. left: bytes of the device that keys
    and values leave."""
    spare = left - HEADROOM if device.kind == "cpu" else device.host_available // 4
    room = max(spare // 2, block_bytes)
    return min(max(QUEUE_BYTES, kv_bytes // 4), room), min(QUEUE_BYTES, room)


def _has_tier(options: EngineOptions) -> bool:
    return bool(options.cache_host or options.cache_dir or options.cache_peer)


def _size_pools(
    options: EngineOptions,
    model: ModelFacts,
    device: DeviceFacts,
    footprint: Footprint,
    length: int,
    batched: int,
    notes: list[str],
) -> tuple[tuple[int, ...], int, int]:
    """Blocks per cache group (scratch block included), the context that fits, and the bytes of all blocks.

    Never more than max_num_seqs sequences of full length can use; otherwise a share of the memory that is left.
    """
    size = options.block_size
    length = _reachable(options, model, device, footprint, length)
    kinds = [group.kind for group in model.groups]
    wanted = [options.max_num_seqs * kind.most(length, batched, size) + 1 for kind in kinds]
    blocks, share = _blocks(options, model, wanted, _budget(options, device, footprint, length))
    pairs = zip(kinds, blocks, strict=True)
    fits = min((kind.comes_to(n - 1, length, batched, size) for kind, n in pairs), default=length)
    if fits < length:
        if options.max_model_len and not options.num_blocks:
            raise ConfigError(
                f"max_model_len {length} does not fit: the KV cache holds {fits} tokens",
                "lower max_model_len, or raise kv_memory or memory_fraction",
            )
        notes.append(f"the context is cut from {length} to {fits} tokens: the KV cache holds no more")
        length = fits  # its rotary angles take less memory
        blocks, share = _blocks(options, model, wanted, _budget(options, device, footprint, length))
    if share < 1:
        notes.append(f"the KV cache holds {share:.1%} of {options.max_num_seqs} full contexts")
    total = sum(n * b for n, b in zip(blocks, model.bytes_per_block, strict=True))
    _refuse_too_much(device, footprint, length, total)
    return tuple(blocks), length, total


def _blocks(options: EngineOptions, model: ModelFacts, wanted: list[int], budget: int) -> tuple[list[int], float]:
    """Blocks of each group, and their share of `wanted`."""
    if options.num_blocks:
        return [options.num_blocks] * len(wanted), 1.0
    need = sum(n * b for n, b in zip(wanted, model.bytes_per_block, strict=True))
    share = max(0.0, min(1.0, budget / max(need, 1)))
    return [max(2, int(n * share)) for n in wanted], share


def _budget(options: EngineOptions, device: DeviceFacts, footprint: Footprint, length: int) -> int:
    """Bytes for keys and values; by default a share of the memory left. Some memory always stays free, more if tiers
    have queues in it."""
    if options.kv_memory:
        return options.kv_memory
    spare = device.memory_available - footprint.to_come(length)
    most = spare - HEADROOM
    if _has_tier(options) and device.kind == "cpu":
        most -= max(0, most) // 3
    return min(most, int(spare * (options.memory_fraction or (0.9 if device.kind == "cuda" else 0.5))))


def _reachable(
    options: EngineOptions, model: ModelFacts, device: DeviceFacts, footprint: Footprint, length: int
) -> int:
    """The context, halved until its angles and rows leave room for keys and values. Raises ConfigError."""
    least = 2 * sum(model.bytes_per_block)
    while not (options.num_blocks or _budget(options, device, footprint, length) >= least):
        if options.max_model_len or model.bidirectional or length <= options.block_size:
            raise ConfigError(
                f"no memory is left for the KV cache: of {_mib(device.memory_available)} that are free after "
                f"loading the weights, buffers take {_mib(footprint.to_come(length))}, and {_mib(HEADROOM)} stay free",
                "raise the memory limit, lower max_num_seqs, max_num_batched_tokens or max_model_len, or use a "
                "smaller model",
            )
        length = max(options.block_size, length // 2)
    return length


def _refuse_too_much(device: DeviceFacts, footprint: Footprint, length: int, kv_bytes: int) -> None:
    """Raises ConfigError if the requested KV memory does not fit next to the weights."""
    if footprint.to_come(length) + kv_bytes > device.memory_available:
        raise ConfigError(
            f"a KV cache of {_mib(kv_bytes)} does not fit: of {_mib(device.memory_available)} that are free after "
            f"loading the weights, buffers take {_mib(footprint.to_come(length))}",
            "lower kv_memory, num_blocks, max_num_seqs or max_model_len",
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


# -- the environment: the only place that reads it -----------------------------------------------------------------


def env(name: str, default: str = "") -> str:
    """A variable of the environment. All reads in the package go through here, with a constant name."""
    return os.environ.get(name, default)


# Set before torch is imported: its idle threads sleep instead of spinning during the next step, and MKL's sums do not
# depend on the instruction set's fast paths or on the position of a row (exactness.md).
_COMPUTING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0", "MKL_CBWR": "AUTO,STRICT"}


# Variables that the libraries under torch read themselves, and by which they choose kernels.
_LIBRARY_SETTINGS = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "DNNL_CPU_ISA_HINTS"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY", "OPENBLAS_CORETYPE"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "TORCH_LINEAR_FLATTEN_3D"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "PYTORCH_TUNABLEOP_ENABLED", "DISABLE_ADDMM_CUDA_LT"),
)


def library_settings() -> dict[str, str]:
    """The variables that change which kernels the libraries under torch choose, by name; "" if not set."""
    return {name: os.environ.get(name, "") for name in _LIBRARY_SETTINGS}


def engine_environment() -> dict[str, str]:
    """The environment for an engine process: that of this process, with settings for exact computing, and with this
    package on the import path."""
    home = str(Path(__file__).resolve().parents[1])
    paths = [home, *(p for p in env("PYTHONPATH").split(os.pathsep) if p and p != home)]
    return {**_COMPUTING, **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def threads_environment(threads: int) -> dict[str, str]:
    """The environment for a process whose numpy computes with this many threads."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {**engine_environment(), **dict.fromkeys(names, str(threads))}


def prepare_torch() -> None:
    """Configures the libraries under torch for an engine; call it before torch is imported."""
    for name, value in _COMPUTING.items():
        os.environ.setdefault(name, value)


def models_dir() -> Path:
    """The folder of the model store, which may not exist yet."""
    own, data = env("KVASIR_MODELS"), env("XDG_DATA_HOME")
    return Path(own).expanduser() if own else Path(data or Path.home() / ".local" / "share") / "kvasir" / "models"


def kernels_dir() -> Path:
    """The folder of compiled GPU kernels, which may not exist yet. Raises RuntimeError without a home."""
    own, cache = env("KVASIR_KERNELS"), env("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else Path(cache or Path.home() / ".cache") / "kvasir" / "kernels"


def socket_base() -> Path:
    """The folder in which folders for sockets are made."""
    return Path(env("XDG_RUNTIME_DIR") or env("TMPDIR") or "/tmp")
