"""Drives a model without a runner: parts in, logits out, with block tables that are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir.layers.kv_cache import KVCache
from kvasir.layers.kv_layout import KVLayout
from tests.layers.parts import Part, batch_of


def make_cache(model: Any, *, blocks: int = 64, block_size: int = 16, dtype=torch.float32, fill=None) -> KVCache:
    """A cache of `blocks` blocks per group; `fill` sets every value, NaN to catch reads of values that were not
    wrote."""
    spec = model.cache_spec()
    cache = KVCache(spec, [blocks] * len(KVLayout.of(spec).groups), block_size, dtype)
    if fill is not None:
        cache.fill_(fill)
    return cache


def table(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def piece(cache: KVCache, ids: Sequence[int], start: int, blocks: np.ndarray, causal: bool = True) -> Part:
    """Tokens of one sequence, with the same block ids in every group."""
    return Part(ids, start, (blocks,) * len(cache.groups), causal)


@torch.inference_mode()
def step(
    model: Any, cache: KVCache, pieces: Sequence[tuple[Sequence[int], int, np.ndarray]], causal: bool = True
) -> list[Tensor]:
    """One forward over (ids, start, block table) of several sequences: hidden rows of each, float32 [count,
    D]."""
    batch = batch_of([piece(cache, *p, causal) for p in pieces], cache)
    hidden_TD = model.forward(batch.tokens_T, batch)
    return [hidden_TD[a:b] for a, b in zip(batch.starts[:-1], batch.starts[1:], strict=True)]


@torch.inference_mode()
def logits_of(model: Any, ids: Sequence[int], *, chunks: Sequence[int] = (), block_size: int = 16, **cache) -> Tensor:
    """Logits [len(ids), V] of one sequence alone, computed in chunks of the given sizes (the rest in one)."""
    blocks = -(-len(ids) // block_size)
    kv = make_cache(model, blocks=blocks + 1, block_size=block_size, **cache)
    rows, start = [], 0
    for size in (*chunks, len(ids)):
        part = ids[start : start + size]
        if len(part):
            rows += step(model, kv, [(part, start, np.arange(1, blocks + 1, dtype=np.int32))])
            start += len(part)
    return model.logits(torch.cat(rows))


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int, eos: Sequence[int] = (), **options) -> list[int]:
    """`count` greedy ids after the prompt, one token a step; ties go to the lower id."""
    kv = make_cache(model, blocks=-(-(len(prompt) + count) // options.get("block_size", 16)) + 1, **options)
    blocks = np.arange(1, kv.num_blocks[0], dtype=np.int32)
    ids, out, start = list(prompt), [], 0
    while len(out) < count and not (out and out[-1] in eos):
        hidden = step(model, kv, [(ids[start:], start, blocks)])[0]
        start = len(ids)
        out.append(int(model.logits(hidden[-1:])[0].argmax()))
        ids.append(out[-1])
    return out
