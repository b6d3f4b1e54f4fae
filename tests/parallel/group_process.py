"""A rank of a process group, for tests: python -m tests.parallel.group_process RANK SIZE BACKEND FILE WHAT OUT"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.distributed as distributed

from kvasir.ops.collective import all_gather, all_reduce, pick_rows
from kvasir.ops.collective.body import complete
from kvasir.parallel import ExpertShare, Mesh, cut
from kvasir.parallel.group import GroupRank

ROWS, WIDTH, TABLE = 5, 48, 40


def numbers(rank: int, *shape: int) -> torch.Tensor:
    """Of every size, so that the order of a sum shows."""
    rng = np.random.default_rng(rank)
    return torch.from_numpy((rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(np.float32))


def collectives(mesh: Mesh, device: str) -> list[np.ndarray]:
    """What a rank gets from each collective."""
    rank, size = mesh.rank, mesh.size
    found = [all_reduce(numbers(rank, ROWS, WIDTH).to(device), mesh, size)]
    columns = cut(WIDTH - 3, size)
    first, last = columns.range(rank)
    found.append(all_gather(numbers(9, ROWS, WIDTH)[:, first:last].to(device), mesh, columns))
    ids = torch.tensor([3, 39, 0, 20, 21], device=device)
    found.append(pick_rows(numbers(rank, ROWS, WIDTH).to(device), ids, mesh, cut(TABLE, size)))
    for share in (ExpertShare(mesh, cut(8, size), 1), ExpertShare(mesh, cut(8, 1), size)):
        rows = numbers(rank, 2 * ROWS, WIDTH).to(device)
        complete(rows, [0, 1, 1, 4, 5, 5, 8, 9, 10], share)
        found.append(rows)
    return [one.cpu().numpy() for one in found]


def main() -> None:
    rank, size, backend, file, what, out = sys.argv[1:]
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(int(rank))
    mesh = GroupRank(int(rank), int(size))
    mesh.connect(file, backend, seconds=300)
    if what == "collectives":
        found = collectives(mesh, device)
    else:
        from kvasir.runner.load import LoadOptions, load_model
        from kvasir.weights.find import find_model
        from tests.models.test_ranks import hidden

        loaded = load_model(find_model(what), "float32", options=LoadOptions(mesh=mesh))
        found = [hidden(loaded.model)]
    np.savez(out, *found)
    distributed.barrier()
    mesh.close()


if __name__ == "__main__":
    main()
