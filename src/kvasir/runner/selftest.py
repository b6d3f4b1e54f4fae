"""Does this machine keep the contract? A few rows through the model's own layers, alone and in company, bit by bit.

The eager executor relies on the libraries under torch: that a matmul of one shape adds in one order, wherever a row
lies in it and however many threads there are. They were measured to do so, but other builds and processors may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvasir import device as devices
from kvasir.layers.attention import Attention
from kvasir.layers.batch import TILE, Slice, make_batch
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.mlp import MLP, GatedMLP

_LENGTH = 70  # reaches into the second tile of keys and the third of rows
_PIECES = (61, 1, 8)  # the border of the tile of keys lies inside the last


@torch.inference_mode()
def run(model: Any, cache: KVCache) -> str:
    """ "exact" where the bits depended on nothing that they must not depend on, else "close".

    `cache` is the model's own: it gives the device, the block size and the type of keys and values, and stays untouched.
    The model's first attention, first MLP and head are tried, with all threads and with one.
    """
    threads = torch.get_num_threads()
    try:
        return "exact" if all(_checks(model, cache, threads)) else "close"
    finally:
        devices.set_threads(threads)


def _checks(model: Any, cache: KVCache, threads: int) -> Iterator[bool]:
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((_LENGTH + 3, model.config.width), np.float32))
    rows_nD, others_nD = noise[:_LENGTH].to(cache.device), noise[_LENGTH:].to(cache.device)
    modules = [module for _, module in model.walk()]
    attention = next(m for m in modules if isinstance(m, Attention) and m.layer == 0)
    mlp = next(m for m in modules if isinstance(m, MLP | GatedMLP))
    together = _attend(attention, cache, rows_nD, (_LENGTH,), others_nD[:0])
    devices.set_threads(1)
    yield torch.equal(together, _attend(attention, cache, rows_nD, _PIECES, others_nD))
    devices.set_threads(threads)
    calls = [lambda x_TD: mlp(x_TD, _no_batch())] + ([model.logits] if hasattr(model, "logits") else [])
    for call in calls:
        many = call(rows_nD[:TILE])
        devices.set_threads(1)
        alone = torch.zeros_like(rows_nD[:TILE])
        alone[3] = rows_nD[TILE - 1]
        yield torch.equal(many[TILE - 1], call(alone)[3])
        devices.set_threads(threads)
