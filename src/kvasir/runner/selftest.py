"""Does this machine keep the contract? A few rows through the model's own layers, alone and in company, bit
by bit.

The eager executor relies on the libraries under torch: that a matmul of one shape adds in one order, wherever
a row lies in it and however many threads there are. They were measured to do so, but other builds and
processors may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir import device as devices
from kvasir.layers.attention import Attention
from kvasir.layers.batch import TILE, Batch, Slice, make_batch
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.linear import Head
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.ops.linear import linear

_LENGTH = 70  # reaches into the second tile of keys and the third of rows
_PIECES = (61, 1, 8)  # the border of the tile of keys lies inside the last
_OUTPUTS = 8192  # of the head: all of a large vocabulary would take longer than the rest
_NEIGHBOUR = 3  # rows of another sequence in front, so that rows change their places in the tiles


@torch.inference_mode()
def run(model: Any, cache: KVCache) -> str:
    """ "exact" where the bits depended on nothing that they must not depend on, else "close".

    `cache` is the model's own: it gives the device, the block size and the type of keys and values, and stays
    untouched. The model's first attention, first MLP and its head are tried, with all threads and with one.
    """
    threads = torch.get_num_threads()
    try:
        return "exact" if all(_checks(model, cache, threads)) else "close"
    finally:
        devices.set_threads(threads)


def _checks(model: Any, cache: KVCache, threads: int) -> Iterator[bool]:
    modules = [module for _, module in model.walk()]
    attention = next(m for m in modules if isinstance(m, Attention) and m.layer == 0)
    mlp = next(m for m in modules if isinstance(m, MLP | GatedMLP))
    noise = np.random.default_rng(0).standard_normal((_LENGTH, model.config.width), np.float32)
    rows_nD = torch.from_numpy(noise).to(cache.device)
    small = _small_cache(cache)

    devices.set_threads(threads)
    whole = _attend(attention, small, rows_nD, (_LENGTH,))
    devices.set_threads(1)
    yield torch.equal(whole, _attend(attention, small, rows_nD, _PIECES, _NEIGHBOUR))

    batch = _batch(small, [(0, TILE)])
    yield _same_alone(lambda x_TD: mlp(x_TD, batch), rows_nD[:TILE], threads)
    weights = [m.weight[:, :_OUTPUTS] for m in modules if isinstance(m, Head)]
    yield all(_same_alone(partial(linear, weight_SNK=w), rows_nD[:TILE], threads) for w in weights)


def _small_cache(cache: KVCache) -> KVCache:
    """A cache like `cache` for the first layer and two sequences, full of NaN."""
    blocks = 2 * -(-_LENGTH // cache.block_size) + 1
    small = KVCache(cache.spec[:1], [blocks], cache.block_size, cache.tensors[0].dtype, cache.device)
    small.fill_(torch.nan)
    return small


def _batch(cache: KVCache, parts: list[tuple[int, int]]) -> Batch:
    """parts: (start, count) of one or two sequences, the last of which has the first blocks."""
    blocks = cache.num_blocks[0] // 2
    tables = [np.arange(1 + blocks * i, 1 + blocks * (i + 1), dtype=np.int32) for i in range(len(parts))][::-1]
    slices = [
        Slice(np.zeros(count, np.int32), start, (table,)) for (start, count), table in zip(parts, tables, strict=True)
    ]
    return make_batch(slices, cache, cache.device)


def _attend(
    attention: Attention, cache: KVCache, rows_nD: Tensor, pieces: tuple[int, ...], neighbour: int = 0
) -> Tensor:
    """The attention of all rows, computed in pieces, each behind `neighbour` rows of another sequence."""
    done, start = [], 0
    for count in pieces:
        parts = [(0, neighbour), (start, count)] if neighbour else [(start, count)]
        batch = _batch(cache, parts)
        x_TD = torch.cat([rows_nD[:neighbour], rows_nD[start : start + count]])
        x_TD = F.pad(x_TD, (0, 0, 0, batch.tokens_T.shape[0] - x_TD.shape[0]))
        done.append(attention(x_TD, batch)[neighbour : neighbour + count])
        start += count
    return torch.cat(done)


def _same_alone(call: Callable[[Tensor], Tensor], rows_TD: Tensor, threads: int) -> bool:
    """Whether the last of a tile's rows, with all threads, equals itself alone elsewhere in the tile, with
    one."""
    devices.set_threads(threads)
    among = call(rows_TD)[-1]
    devices.set_threads(1)
    alone = torch.zeros_like(rows_TD)
    alone[3] = rows_TD[-1]
    return torch.equal(among, call(alone)[3])
