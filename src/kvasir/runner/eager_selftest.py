"""Self-test of the eager executor: whether the libraries under torch compute batch-invariant bits on this machine.
Compares a few rows through the model's own layers, alone and in a batch, bit by bit.

A matmul of a given shape must add in the same order for every row position and number of threads. Measurements confirm
that the libraries do, but other builds and processors may differ.
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
from kvasir.layers.batch import TILE, Batch, make_batch
from kvasir.layers.block import Mixer
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.kv_layout import KVLayout
from kvasir.layers.linear import Head
from kvasir.layers.mlp import MLP, GatedMLP
from kvasir.layers.rows import RowArrays
from kvasir.ops.linear import linear
from kvasir.plan import Work

_LENGTH = 70  # reaches into the second tile of keys and the third of rows
_PIECES = (61, 1, 8)  # the border between tiles of keys lies inside the last piece
_OUTPUTS = 8192  # columns of the head: a whole large vocabulary would take longer than the rest
_NEIGHBOUR = 3  # rows of another sequence put first, so that rows change their places in the tiles


@torch.inference_mode()
def run(model: Any, cache: KVCache) -> str:
    """Returns "exact" if the bits do not depend on the batch, chunks or threads, else "close".

    cache: the model's own; gives the device, the block size and the dtype of keys and values, and is not changed.
    Tests the first layer of each type that mixes tokens, the first MLP if there is one, and the head, with all threads
    and with one.
    """
    threads = torch.get_num_threads()
    try:
        return "exact" if all(_checks(model, cache, threads)) else "close"
    finally:
        devices.set_threads(threads)


def _checks(model: Any, cache: KVCache, threads: int) -> Iterator[bool]:
    modules = [module for _, module in model.walk()]
    mixers = {type(m): m for m in reversed(modules) if isinstance(m, Mixer)}.values()
    mlps = [m for m in modules if isinstance(m, MLP | GatedMLP)]  # there may be none
    noise = np.random.default_rng(0).standard_normal((_LENGTH, model.config.width), np.float32)
    rows_nD = torch.from_numpy(noise).to(cache.device)
    places = (getattr(part, "layer", 0) for mixer in mixers for _, part in mixer.walk())  # also those of indexers
    small = _small_cache(cache, 1 + max(places))

    for mixer in mixers:
        devices.set_threads(threads)
        whole = _mix(mixer, small, rows_nD, (_LENGTH,))
        devices.set_threads(1)
        yield torch.equal(whole, _mix(mixer, small, rows_nD, _PIECES, _NEIGHBOUR))

    batch = _batch(small, [(0, TILE)])
    for mlp in mlps[:1]:
        yield _same_alone(partial(mlp, batch=batch), rows_nD[:TILE], threads)
    weights = [m.weight[:, :_OUTPUTS] for m in modules if isinstance(m, Head)]
    yield all(_same_alone(partial(linear, weight_SNK=w), rows_nD[:TILE], threads) for w in weights)


def _small_cache(cache: KVCache, layers: int) -> KVCache:
    """A cache like `cache` for the first `layers` layers and two sequences, filled with NaN."""
    spec = cache.spec[:layers]
    blocks = [2 * -(-_LENGTH // cache.block_size) + 1] * len(KVLayout.of(spec).groups)
    small = KVCache(spec, blocks, cache.block_size, cache.dtype, cache.device)
    small.fill_(torch.nan)
    return small


def _batch(cache: KVCache, parts: list[tuple[int, int]]) -> Batch:
    """A batch of one or two sequences. parts: (start, count) of each; the last sequence has the first blocks."""
    blocks = cache.num_blocks[0] // 2
    rows = RowArrays.empty(len(parts), max(start + count for start, count in parts), len(cache.groups), blocks)
    for table in rows.tables:
        table[::-1] = np.arange(1, 1 + len(parts) * blocks).reshape(len(parts), blocks)
    return make_batch([Work(row, *part) for row, part in enumerate(parts)], rows, cache)


def _mix(mixer: Mixer, cache: KVCache, rows_nD: Tensor, pieces: tuple[int, ...], neighbour: int = 0) -> Tensor:
    """The mixer's outputs, computed in pieces, each after `neighbour` rows of another sequence."""
    done, start = [], 0
    for count in pieces:
        parts = [(0, neighbour), (start, count)] if neighbour else [(start, count)]
        batch = _batch(cache, parts)
        x_TD = torch.cat([rows_nD[:neighbour], rows_nD[start : start + count]])
        x_TD = F.pad(x_TD, (0, 0, 0, batch.tokens_T.shape[0] - x_TD.shape[0]))
        done.append(mixer(x_TD, batch)[neighbour : neighbour + count])
        start += count
    return torch.cat(done)


def _same_alone(call: Callable[[Tensor], Tensor], rows_TD: Tensor, threads: int) -> bool:
    """Whether the output of a tile's last row, computed with all threads, equals that of the row alone, elsewhere in
    the tile, with one thread."""
    devices.set_threads(threads)
    among = call(rows_TD)[-1]
    devices.set_threads(1)
    alone = torch.zeros_like(rows_TD)
    alone[3] = rows_TD[-1]
    return torch.equal(among, call(alone)[3])
