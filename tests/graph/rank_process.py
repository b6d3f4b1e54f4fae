"""A rank of the graph executor, for tests: python -m tests.graph.rank_process RANK SIZE BACKEND FILE OUT DTYPE MODEL...

Writes, for each model, the hidden states and the logits that it computes for one sequence.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from kvasir import device as devices
from kvasir.graph.triton import NO_TOKEN
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.kv_layout import cache_groups
from kvasir.layers.tensors import torch_dtype
from kvasir.parallel import SOLO, Mesh
from kvasir.parallel.group import GroupRank
from kvasir.plan import Capacity
from kvasir.runner.graph_executor import GraphExecutor
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.make_graph import make_executor
from kvasir.weights.find import find_model

BLOCK, BLOCKS = 16, 12
CHUNKS = (129, 1, 21)  # the first takes whole sums, the others their parts
CHOSEN = 5


def executor_of(model: str, dtype: str, device: str, mesh: Mesh) -> GraphExecutor:
    loaded = load_model(find_model(model), dtype, device, options=LoadOptions("graph", BLOCK, mesh=mesh))
    assert loaded.executor == "graph"
    groups = cache_groups(loaded.layout, BLOCK, loaded.dtype)
    capacity = Capacity(2, 144, BLOCK * BLOCKS, BLOCK, groups, (BLOCKS + 2,) * len(groups), 0, 0, CHOSEN)
    for rope in loaded.ropes():
        rope.serve(capacity.max_model_len)
    cache = KVCache(loaded.layout, list(capacity.num_blocks), BLOCK, torch_dtype(loaded.dtype), device)
    cache.fill_(0)
    return make_executor(loaded, cache, capacity)


@torch.inference_mode()
def computed(model: str, dtype: str, device: str, mesh: Mesh) -> list[np.ndarray]:
    """The hidden states of all chunks, and logits of the last rows of each."""
    executor, found = executor_of(model, dtype, device, mesh), []
    forward, step, start = executor.forward, executor.forward.step, 0
    vocab = executor.model.config.vocab_size
    step.ids[0, : sum(CHUNKS)] = torch.tensor([(7 * i * i + 3 * i + 1) % vocab for i in range(sum(CHUNKS))])
    for table in step.tables:
        table[0, :BLOCKS] = torch.arange(1, 1 + BLOCKS)
    for count in CHUNKS:
        step.pieces[:] = torch.tensor([0, 0, 0, NO_TOKEN, 0])
        step.pieces[0] = torch.tensor([0, start, count, 0, 0])
        executor.replays("rows", count)
        found.append(forward.value(forward.hidden, count).float().cpu().numpy().copy())
        last = min(CHOSEN, count)
        step.chosen[:last] = torch.arange(count - last, count)
        executor.replays("chosen", last)
        assert forward.logits is not None
        found.append(forward.value(forward.logits, last).cpu().numpy().copy())
        start += count
    executor.close()
    return found


def main() -> None:
    rank, size, backend, file, out, dtype, *models = sys.argv[1:]
    device = "cuda" if backend == "nccl" else "cpu"
    devices.use(device, int(rank))
    mesh = SOLO
    if size != "1":
        mesh = GroupRank(int(rank), int(size))
        mesh.connect(file, backend, seconds=300)
    found = {}
    for i, model in enumerate(models):
        parts = computed(model, dtype, device, mesh)
        found |= {f"{i} {j}": part for j, part in enumerate(parts)}
    np.savez(out, **found)
    if isinstance(mesh, GroupRank):
        mesh.close()


if __name__ == "__main__":
    main()
