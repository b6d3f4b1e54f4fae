"""The same bits, always: however a sequence is cut into steps, whatever runs beside it, wherever its blocks lie.

Caches start full of NaN, and blocks that a window has left behind are given back and filled with NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layers.parts import Part, batch_of
from tests.models.driver import logits_of, make_cache
from tests.models.families import config_of
from tests.models.oracle import dummy, random_ids

FEW = ("llama-biased-tied", "gemma2", "qwen3-moe-mixed", "qwen3-next")  # one for each mechanism
MORE = (
    *("llama-3", "mistral", "qwen2-windows", "qwen3", "gemma3", "phi3", "mixtral", "granite-hybrid"),
    *("gemma3n", "gemma4", "gemma4-moe", "deepseek-v2", "mimo-v2-flash"),
)
NAMES = (*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE))
LENGTH = 100
pytestmark = pytest.mark.usefixtures("exact_machine")

MODELS: dict = {}


def model_of(name: str, dtype: torch.dtype):
    if (name, dtype) not in MODELS:
        model = dummy(config_of(name), dtype)
        ids = random_ids(LENGTH, 96)
        MODELS[name, dtype] = model, ids, logits_of(model, ids, dtype=dtype, fill=torch.nan)
    return MODELS[name, dtype]


both = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
# The oracle of the engine covers float32 on the eager executor, too.
mostly_bfloat16 = pytest.mark.parametrize(
    "dtype",
    (pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16),
    ids=("float32", "bfloat16"),
)


def slow(*values):
    return (pytest.param(value, marks=pytest.mark.slow) for value in values)


@pytest.mark.few(4)
@mostly_bfloat16
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", ([63, 1, 1], [7] * 12, *slow([55] + [1] * 15, [1] * 20)), ids=str)
def test_chunks_equal_one_step(name, dtype, chunks):
    model, ids, logits = model_of(name, dtype)
    assert torch.isfinite(logits).all()
    assert torch.equal(logits_of(model, ids, chunks=chunks, dtype=dtype, fill=torch.nan), logits)


@mostly_bfloat16
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", (8, 64, *slow(32, 128)))
def test_the_block_size_changes_no_bit(name, dtype, size):
    model, ids, logits = model_of(name, dtype)
    found = logits_of(model, ids, chunks=[90, 1], block_size=size, dtype=dtype, fill=torch.nan)
    assert torch.equal(found, logits)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threads", (3, *slow(2)))
def test_the_number_of_threads_changes_no_bit(name, threads):
    """In bfloat16: in float32 eager computes on one thread."""
    dtype = torch.bfloat16
    model, ids, logits = model_of(name, dtype)
    torch.set_num_threads(threads)
    assert torch.equal(logits_of(model, ids, chunks=[40, 1], dtype=dtype, fill=torch.nan), logits)


@dataclass
class Running:
    """A sequence under way. tables: per cache group, with entries that the window has left pointing anywhere."""

    ids: list[int]
    tables: list[np.ndarray]
    done: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)


@torch.inference_mode()
def run_together(model, sequences: list[list[int]], counts: list[int], dtype: torch.dtype, seed: int) -> list:
    """All sequences through one cache of scattered blocks, steps of as many tokens as drawn from `counts`."""
    block_size = 16
    need = [-(-len(ids) // block_size) for ids in sequences]
    cache = make_cache(model, blocks=sum(need) + 1, block_size=block_size, dtype=dtype, fill=torch.nan)
    random = np.random.default_rng(seed)
    shuffled = [random.permutation(np.arange(1, sum(need) + 1, dtype=np.int32)) for _ in cache.groups]
    ends = np.cumsum(need)[:-1]
    tables_of = list(zip(*[np.split(blocks, ends) for blocks in shuffled], strict=True))
    running = [Running(ids, list(tables)) for ids, tables in zip(sequences, tables_of, strict=True)]
    while any(s.done < len(s.ids) for s in running):
        chosen, parts = [], []
        for s in running:
            count = min(int(random.choice(counts)), len(s.ids) - s.done)
            if count:
                chosen.append(s)
                ids = np.array(s.ids[s.done : s.done + count], np.int32)
                parts.append(Part(ids, s.done, tuple(s.tables)))
                s.done += count
        if not parts:
            continue
        order = random.permutation(len(parts))
        batch = batch_of([parts[i] for i in order], cache)
        hidden = model.forward(batch.tokens_T, batch)
        for i, a, b in zip(order, batch.starts[:-1], batch.starts[1:], strict=True):
            chosen[i].rows.append(hidden[a:b])
        give_back(cache, chosen)
    return [model.logits(torch.cat(s.rows)) for s in running]


def give_back(cache, running: list[Running]) -> None:
    """Blocks wholly outside of the next token's window are freed: NaN in them, and a stale id in the table."""
    for g, group in enumerate(cache.groups):
        if group.kind.forgets:
            for s in running:
                behind = group.kind.first(s.done, cache.block_size)
                for tensor in (tensor for _, tensors in cache.of_group(g) for tensor in tensors):
                    tensor[:, :, s.tables[g][:behind]] = torch.nan
                s.tables[g] = s.tables[g].copy()
                s.tables[g][:behind] = 0


@pytest.mark.few(2)
@settings(max_examples=3, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 1, 2, 5, 17, 40, 64]), min_size=3, max_size=7).filter(any),
    seed=st.integers(0, 1000),
)
@mostly_bfloat16
@pytest.mark.parametrize("name", NAMES)
def test_batched_rows_equal_single_ones(name, dtype, counts, seed):
    model, ids, logits = model_of(name, dtype)
    lengths = [LENGTH, 1 + seed % 70, 3]
    sequences = [ids[:length] for length in lengths]
    found = run_together(model, sequences, counts, dtype, seed)
    for length, rows in zip(lengths, found, strict=True):
        assert torch.equal(rows, logits[:length])


@both
def test_nan_stays_with_its_sequence(dtype):
    """A token whose embedding is NaN spoils later rows of its own sequence, and nothing else."""
    model = dummy(config_of("mistral"), dtype)
    model.embed.weight = model.embed.weight.clone()
    bad, ids = 95, [i % 95 for i in random_ids(80, 96)]
    logits = logits_of(model, ids, dtype=dtype)
    model.embed.weight[bad] = torch.nan
    sick = [*ids[:40], bad, *ids[41:]]
    healthy, spoiled = run_together(model, [ids, sick], [33, 80, 5], dtype, 0)
    assert torch.equal(healthy, logits)
    assert torch.equal(spoiled[:40], logits[:40])
    assert spoiled[40:64].isnan().all()
