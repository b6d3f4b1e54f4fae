"""Whether a model fits into memory in addition to the loaded ones, and how many bytes its KV cache gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvasir.config import EngineOptions
from kvasir.serve.hosting.offers import Offer

MIB = 1 << 20
OVERHEAD = 400 * MIB  # of an engine process: interpreter, libraries, workspace
MIN_TOKENS = 4096  # of KV cache that a model must have room for, unless its context is shorter
UNKNOWN_KV = 64 * MIB  # bytes, where the files do not give the size of a token
SPARE_BLOCKS = 2
SLACK = 1.1  # covers what the headers of the files leave out
SHARE = 0.5  # of the memory that the weights leave, for all KV caches
GPU_SHARE = 0.9


class MemoryBudget:
    """An estimate; it owns no memory. available: returns the bytes that the host has free, or None where that is
    unknown, as for a GPU before its libraries are loaded. Then only the number of models and the engine's own check
    limit the memory."""

    def __init__(self, available: Callable[[], int | None], max_models: int):
        self._available = available
        self._max_models = max_models
        self._budget: int | None = None

    def free(self, reserved: Iterable[int]) -> int | None:
        """Bytes for more models. reserved: bytes given to each model that is loaded or being loaded; these may not have
        been touched yet."""
        now, taken = self._available(), list(reserved)
        if not taken:
            self._budget = now
        if now is None or self._budget is None:
            return None
        return max(0, min(now, self._budget - sum(taken)))

    def sized(self, offer: Offer, options: EngineOptions, free: int | None, loaded: int) -> tuple[EngineOptions, int]:
        """The options with a KV cache size, unless they have one, and the bytes to reserve."""
        weights, least = needed(offer, options)
        if free is None:
            share = options.memory_fraction or GPU_SHARE / max(1, self._max_models - loaded)
            return replace(options, memory_fraction=share, host_share=1 / self._max_models), 0
        if options.kv_memory or options.num_blocks or options.memory_fraction:
            return options, weights + least
        half = int((free - weights) * SHARE)
        share = max(half // max(1, self._max_models - loaded), min(half, most_kv(offer, options, 1)))
        kv = max(least, min(share, most_kv(offer, options, options.max_num_seqs)))
        return replace(options, kv_memory=kv), weights + kv


def unloading(need: int, free: int | None, places: int, ending: Sequence[int], idle: Sequence[int]) -> int | None:
    """How many of the idle models must be unloaded, in their order, to load one more; None: unloading all is not
    enough.

    need, free: bytes, free None if unknown. places: how many more may be loaded, below 0 if some are promised. ending,
    idle: the bytes of models that are being unloaded, and of those that could be.
    """
    for count in range(len(idle) + 1):
        gone = (*ending, *idle[:count])
        if places + len(gone) > 0 and (free is None or need <= free + sum(gone)):
            return count
    return None


def needed(offer: Offer, options: EngineOptions) -> tuple[int, int]:
    """Bytes of the process with its weights, and of the smallest KV cache."""
    context = offer.details.context_length or MIN_TOKENS
    least = options.kv_memory or _kv(offer, options, options.max_model_len or min(context, MIN_TOKENS), 1)
    weights = min(offer.size, options.weights_memory or offer.size)  # the others are streamed
    return weights + OVERHEAD, least or UNKNOWN_KV


def most_kv(offer: Offer, options: EngineOptions, rows: int) -> int:
    """Bytes of KV cache for `rows` rows with full contexts."""
    return _kv(offer, options, options.max_model_len or offer.details.context_length, rows) or UNKNOWN_KV * 16


def _kv(offer: Offer, options: EngineOptions, tokens: int, rows: int) -> int:
    """Bytes of KV cache for `rows` rows of `tokens` tokens; 0 where the files do not give the size of a token."""
    size = options.block_size
    is_wide = "float32" in (options.dtype, options.kv_dtype) or offer.details.quantization_level == "F32"
    per_token = offer.details.kv_bytes_per_token * (2 if is_wide else 1)
    return int(per_token * size * (rows * -(-tokens // size) + SPARE_BLOCKS) * SLACK)
