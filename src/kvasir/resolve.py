"""Decides every value that an engine runs with, from a user's options and the facts of the model and the machine."""

from __future__ import annotations

from kvasir.config import GIB, DeviceFacts, EngineConfig, EngineOptions, ModelFacts, check, exchanges, slo_targets
from kvasir.errors import ConfigError
from kvasir.memory import HEADROOM, QUEUE_BYTES, Footprint
from kvasir.speculation import parse


def resolve(options: EngineOptions, model: ModelFacts, device: DeviceFacts) -> EngineConfig:
    """Combines options and facts. Raises ConfigError if they contradict each other."""
    check(options)
    notes = list(model.notes)
    length = options.max_model_len or model.max_positions
    if length > model.max_positions:
        raise ConfigError(
            f"max_model_len {length} is beyond the {model.max_positions} positions of the model",
            f"give at most {model.max_positions}, or extend the model with --rope-scaling if its authors say how",
        )
    batched = options.max_num_batched_tokens or (2048 if device.kind == "cuda" or model.streams else 512)
    if model.bidirectional:
        _refuse_parts(options, length)
        if batched < length:
            notes.append(f"a step holds {length} tokens, and this model computes a whole text in one step")
            batched = length
    kv_dtype = _kv_dtype(options.kv_dtype, model.dtype)
    footprint = model.footprint(batched)
    num_blocks, length, kv_bytes, kv_share = _size_pools(options, model, device, footprint, length, batched, notes)
    left = device.memory_available - footprint.to_come(length) - kv_bytes
    load_bytes, save_bytes = _queues(options, device, left, kv_bytes, max(model.bytes_per_block))
    transfer_bytes = _transfer_bytes(options, device, left)
    queues = (load_bytes + save_bytes) * _has_tier(options) + 2 * transfer_bytes
    free = left - queues * (device.kind == "cpu")
    return EngineConfig(
        model=options.model,
        served_model_name=options.served_model_name or options.model,
        dtype=model.dtype,
        kv_dtype=kv_dtype,
        device=device.kind,
        executor=model.executor,
        threads=max(1, (options.threads or device.threads) // (options.tensor_parallel * options.pipeline_parallel)),
        overlap=_overlap(options, device),
        pin=options.pin,
        tensor_parallel=options.tensor_parallel,
        pipeline_parallel=options.pipeline_parallel,
        max_model_len=length,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=batched,
        max_chunk=min(options.max_chunk or batched, batched),
        block_size=options.block_size,
        num_blocks=num_blocks,
        kv_bytes=kv_bytes,
        kv_share=kv_share,
        max_waiting=options.max_waiting,
        jump_ahead=options.jump_ahead,
        drafters=parse(options.speculate),
        draft_max=options.draft_max,
        draft_max_model_len=options.draft_max_model_len,
        prefix_cache=options.prefix_cache,
        cache_eviction=options.cache_eviction,
        cache_host=_cache_host(options, device),
        cache_dir=options.cache_dir,
        cache_disk=options.cache_disk or 16 * GIB,
        cache_write_share=options.cache_write_share or (0.03 if device.kind == "cpu" else 1.0),
        cache_offer=options.cache_offer,
        cache_peer=options.cache_peer,
        role=options.role,
        exchanges=exchanges(options),
        transfer_bytes=transfer_bytes,
        load_bytes=load_bytes,
        save_bytes=save_bytes,
        footprint=footprint,
        memory_left=free,
        max_loras=min(options.max_loras, options.max_cpu_loras or options.max_loras),
        max_cpu_loras=options.max_cpu_loras or options.max_loras,
        max_lora_rank=options.max_lora_rank,
        expects_adapters=options.expects_adapters,
        lora_memory=_lora_memory(options, free),
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


def _transfer_bytes(options: EngineOptions, device: DeviceFacts, left: int) -> int:
    """Bytes of blocks that may be on their way to other engines, and from them. left: as for `_queues`."""
    if not exchanges(options):
        return 0
    spare = left - HEADROOM if device.kind == "cpu" else device.host_available // 2
    return (options.transfer_memory or min(2 * GIB, max(spare, QUEUE_BYTES))) // 2


def _lora_memory(options: EngineOptions, free: int) -> int:
    """Bytes of adapters in memory. Raises ConfigError if more are requested than stay free."""
    if options.lora_memory and options.lora_memory > free:
        raise ConfigError(
            f"lora_memory is {_mib(options.lora_memory)}, and {_mib(free)} stay free", "lower it, or lower kv_memory"
        )
    return options.lora_memory or int(max(0, free) // 4 * options.host_share)


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
) -> tuple[tuple[int, ...], int, int, float]:
    """Blocks per cache group (scratch block included), the context that fits, the bytes of all blocks, and their share
    of what max_num_seqs sequences of full length use.

    Never more than max_num_seqs sequences of full length can use; otherwise a share of the memory that is left.
    """
    size = options.block_size
    length = _reachable(options, model, device, footprint, length)
    kinds = [group.kind for group in model.groups]
    wanted = [options.max_num_seqs * kind.most(length, batched, size) + 1 for kind in kinds]
    blocks, share = _blocks(options, model, wanted, _budget(options, model, device, footprint, length))
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
        blocks, share = _blocks(options, model, wanted, _budget(options, model, device, footprint, length))
    total = sum(n * b for n, b in zip(blocks, model.bytes_per_block, strict=True))
    _refuse_too_much(device, footprint, length, total)
    return tuple(blocks), length, total, share


def _blocks(options: EngineOptions, model: ModelFacts, wanted: list[int], budget: int) -> tuple[list[int], float]:
    """Blocks of each group, and their share of `wanted`."""
    if options.num_blocks:
        return [options.num_blocks] * len(wanted), 1.0
    need = sum(n * b for n, b in zip(wanted, model.bytes_per_block, strict=True))
    share = max(0.0, min(1.0, budget / max(need, 1)))
    return [max(2, int(n * share)) for n in wanted], share


def _budget(options: EngineOptions, model: ModelFacts, device: DeviceFacts, footprint: Footprint, length: int) -> int:
    """Bytes for keys and values; by default a share of the memory left, a greater one if more sequences cost a step
    next to nothing. Some memory always stays free, more if tiers have queues in it."""
    if options.kv_memory:
        return options.kv_memory
    spare = device.memory_available - footprint.to_come(length)
    most = spare - HEADROOM
    if _has_tier(options) and device.kind == "cpu":
        most -= max(0, most) // 3
    usual = (0.9 if device.kind == "cuda" or model.streams else 0.5) * options.host_share
    return min(most, int(spare * (options.memory_fraction or usual)))


def _reachable(
    options: EngineOptions, model: ModelFacts, device: DeviceFacts, footprint: Footprint, length: int
) -> int:
    """The context, halved until its angles and rows leave room for keys and values. Raises ConfigError."""
    least = 2 * sum(model.bytes_per_block)
    while not (options.num_blocks or _budget(options, model, device, footprint, length) >= least):
        if options.max_model_len or model.bidirectional or length <= options.block_size:
            if options.kv_memory:
                raise ConfigError(
                    f"kv_memory is {options.kv_memory} bytes; two blocks, the least, take {least}",
                    f"give at least {least}, or leave it out for a share of the free memory",
                )
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
