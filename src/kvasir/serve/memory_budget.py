"""Whether a model fits into memory beside the loaded ones, and how many bytes its KV cache gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvasir.config import EngineOptions
from kvasir.serve.offers import Offer

MIB = 1 << 20
OVERHEAD = 400 * MIB  # of an engine process: the interpreter, libraries, workspace
MIN_TOKENS = 4096  # of keys and values that a model must have room for, where its context is as long
UNKNOWN_KV = 64 * MIB  # where the files do not say what a token takes
SPARE_BLOCKS = 2
SLACK = 1.1  # the files' headers are not the whole truth
SHARE = 0.5  # of what the weights leave, for all keys and values together
GPU_SHARE = 0.9


class MemoryBudget:
    """An estimate; it owns no memory. available: returns the bytes that the host has now, or None where that is
    unknown, as for a GPU before its libraries are loaded. Then the number of models and the engine's own check are the
    bounds."""

    def __init__(self, available: Callable[[], int | None], max_models: int):
        self._available = available
        self._max_models = max_models
        self._budget: int | None = None

    def free(self, reserved: Iterable[int]) -> int | None:
        """Bytes for more models. reserved: what those that are loaded, or being loaded, were given, of which they may
        not have touched all yet."""
        now, taken = self._available(), list(reserved)
        if not taken:
            self._budget = now
        if now is None or self._budget is None:
            return None
        return max(0, min(now, self._budget - sum(taken)))

    def sized(self, offer: Offer, options: EngineOptions, free: int | None, loaded: int) -> tuple[EngineOptions, int]:
        """The options with a bound on keys and values, unless they have one, and the bytes to reserve."""
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
    """How many of the idle models have to go, in their order, for one more to be loaded; None: all are not enough.

    need, free: bytes, free None where no one knows. places: how many more may be loaded, below 0 if some are promised.
    ending, idle: the bytes of models that are going, and of those that could.
    """
    for count in range(len(idle) + 1):
        gone = (*ending, *idle[:count])
        if places + len(gone) > 0 and (free is None or need <= free + sum(gone)):
            return count
    return None


def needed(offer: Offer, options: EngineOptions) -> tuple[int, int]:
    """Bytes of the process with its weights, and the least of keys and values."""
    context = offer.details.context_length or MIN_TOKENS
    least = options.kv_memory or _kv(offer, options, options.max_model_len or min(context, MIN_TOKENS), 1)
    return offer.size + OVERHEAD, least or UNKNOWN_KV


def most_kv(offer: Offer, options: EngineOptions, rows: int) -> int:
    """What so many rows with full contexts take."""
    return _kv(offer, options, options.max_model_len or offer.details.context_length, rows) or UNKNOWN_KV * 16


def _kv(offer: Offer, options: EngineOptions, tokens: int, rows: int) -> int:
    """Bytes of so many rows of that length; 0 where the files do not say what a token takes."""
    size = options.block_size
    is_wide = "float32" in (options.dtype, options.kv_dtype) or offer.details.quantization_level == "F32"
    per_token = offer.details.kv_bytes_per_token * (2 if is_wide else 1)
    return int(per_token * size * (rows * -(-tokens // size) + SPARE_BLOCKS) * SLACK)
