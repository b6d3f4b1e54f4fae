"""The tensors that the graph executor needs besides weights and KV cache, counted without allocating them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvasir.graph.draws import Draws
from kvasir.graph.fold import fold
from kvasir.graph.forward import Forward, StepBuffers
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.tensors import torch_dtype
from kvasir.models.drafting import TARGET
from kvasir.runner.graph_draft import DraftForwards
from kvasir.runner.load import LoadedModel
from kvasir.runner.proposals import LAG
from kvasir.speculation import MAX_DRAFTED

_FLOAT = 4
MAX_CHOSEN = 64  # rows of logits that are computed at a time


def most_chosen(rows: int, drafted: int) -> int:
    """Rows of logits in the largest bucket, for so many running sequences and drafted ids of one."""
    return min(MAX_CHOSEN, rows * (1 + drafted))


def graph_memory(
    loaded: LoadedModel, *, tokens: int, rows: int, block_size: int, kv_dtype: str, adapters: bool = False
) -> tuple[int, int]:
    """Bytes of the buffers of a step and of sampling. tokens: most tokens of a step. rows: most running sequences.
    adapters: with room for them, without their matrices."""
    assert loaded.trace is not None
    layout, meta = loaded.layout, torch.device("meta")
    groups, chosen = len(layout.groups), most_chosen(rows, MAX_DRAFTED)
    cache = KVCache(layout, [1] * groups, block_size, torch_dtype(kv_dtype), meta)
    step = StepBuffers.empty(
        rows=rows, ids=1, blocks=[1] * groups, pieces=1 << (rows - 1).bit_length(), tokens=tokens, chosen=chosen,
        device=meta,
    )  # fmt: skip
    forward = Forward(
        loaded.trace, fold(loaded.trace), cache.of(TARGET), step, max_tokens=tokens, max_chosen=chosen, positions=1,
        dtype=loaded.dtype,
    )  # fmt: skip
    if adapters:
        forward.add_adapters()
    vocab = loaded.model.config.vocab_size
    sampler = num_bytes(Draws(step.ids, chosen, vocab)) if forward.logits is not None else 0
    drafting = _draft_bytes(loaded, forward, cache, tokens, rows) if loaded.draft else 0
    return forward.num_bytes + num_bytes(step) + drafting, sampler


def _draft_bytes(loaded: LoadedModel, target: Forward, cache: KVCache, tokens: int, rows: int) -> int:
    """Bytes of the buffers of a draft model, and of the tensors that are made while it drafts: hidden rows that wait
    until they are computed, and those of a step; logits of ids that both models have."""
    draft = loaded.draft
    assert draft is not None and loaded.trace is not None
    forwards = DraftForwards(draft, loaded.trace, target, cache, max_tokens=tokens, max_rows=rows, positions=1)
    common = 0 if draft.target_ids is None else len(draft.target_ids)
    made = (
        ((LAG + draft.depth) * rows + 2 * tokens) * forwards.taps_width
        + 2 * rows * draft.width
        + forwards.max_chosen * common
    )
    return forwards.num_bytes + _FLOAT * made


def num_bytes(holder: Any) -> int:
    """Bytes of all tensors that an object holds, also through its own objects."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(holder))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif type(value).__module__.startswith("kvasir."):
        for name in getattr(value, "__slots__", None) or vars(value):
            yield from _tensors(getattr(value, name))
