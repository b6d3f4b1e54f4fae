"""Measures what the graph executor takes of a GPU's memory besides its tensors: recorded launches, the code of kernels
and what the allocators round up. CUDA documents no figures for these, so all launches are recorded once over a cache of
a few blocks, before the size of the real cache is chosen.
"""

from __future__ import annotations

import gc

import torch

from kvasir import device as devices
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.kv_layout import cache_groups
from kvasir.layers.tensors import torch_dtype
from kvasir.ops.compiling import Progress
from kvasir.plan import Capacity
from kvasir.runner.load import LoadedModel
from kvasir.runner.make_graph import make_draft, make_executor
from kvasir.speculation import MAX_DRAFTED

_BLOCKS = 16  # of the longest sequence


def recorded_bytes(
    loaded: LoadedModel, *, kind: str, tokens: int, rows: int, block_size: int, kv_dtype: str,
    progress: Progress | None = None, adapters: bool = False,
) -> int:  # fmt: skip
    """Bytes besides tensors, of one rank, which exchanges nothing here. kind: of the device. tokens: most tokens of a
    step. rows: most running sequences. progress: of compiling the kernels. adapters: with launches for them."""
    layout, dtype = loaded.layout, torch_dtype(kv_dtype)
    groups = cache_groups(layout, block_size, kv_dtype)
    capacity = Capacity(
        rows, tokens, _BLOCKS * block_size, block_size, groups, (2,) * len(groups), loaded.model.config.vocab_size,
        max_drafted=MAX_DRAFTED,
    )  # fmt: skip
    free, tensors = devices.available(kind), devices.allocated(kind)
    cache = KVCache(layout, [2] * len(groups), block_size, dtype, torch.device(kind))
    executor = make_executor(loaded, cache, capacity, adapters=adapters)
    draft = make_draft(loaded, cache, capacity, executor) if loaded.draft else None
    executor.replays.record_all(progress)
    if draft:
        draft.record_all(progress)
    tensors = devices.allocated(kind) - tensors
    taken = free - devices.available(kind) - tensors
    executor.close()
    del executor, draft, cache
    gc.collect()
    return max(0, taken)
