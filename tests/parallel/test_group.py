"""Ranks of a process group of torch, over gloo here and over NCCL on GPUs: the bits of one rank, in the fixed tree."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvasir.parallel.group import GroupRank  # noqa: E402
from kvasir.parallel.local import LocalRanks  # noqa: E402
from tests.parallel.group_process import collectives  # noqa: E402

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def of_group(size: int, backend: str, folder: Path, what: str) -> list[list[np.ndarray]]:
    """What each process of a group has found."""
    outs = [folder / f"{rank}.npz" for rank in range(size)]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.group_process", *map(str, (rank, size, backend)),
             str(folder / "store"), what, str(out)]
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    try:
        assert [one.wait(600) for one in running] == [0] * size
    finally:
        for one in running:
            one.kill()
            one.wait()
    return [list(np.load(out).values()) for out in outs]


def of_threads(size: int) -> list[list[np.ndarray]]:
    ranks = LocalRanks(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda mesh: collectives(mesh, "cpu"), ranks.meshes))


def same(found: Any, expected: Any) -> bool:
    return all(
        np.array_equal(a.view(np.uint32), b.view(np.uint32))
        for mine, theirs in zip(found, expected, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def test_a_rank_that_has_not_met_the_others_tries_launches_alone():
    mesh, everyones = GroupRank(0, 2), torch.full((2, 3), 7.0)
    mesh.gather_into(everyones, torch.zeros(3), 2)
    assert everyones.eq(7).all()
    with pytest.raises(AssertionError, match="not met"):
        mesh.meet(np.zeros(3, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_collectives_over_gloo(tmp_path, size):
    found = of_group(size, "gloo", tmp_path, "collectives")
    assert same(found, of_threads(size))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4, 8])
def test_collectives_over_nccl(tmp_path, size):
    if size > GPUS:
        pytest.skip(f"torch sees {GPUS} GPUs, {size} are needed")
    assert same(of_group(size, "nccl", tmp_path, "collectives"), of_threads(size))
