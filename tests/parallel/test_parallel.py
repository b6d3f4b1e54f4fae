"""How things are cut, and how ranks join what they have."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import ConfigError
from kvasir.parallel import SOLO, ExpertShare, Mesh, cut, picked, side_by_side, tree_sum
from kvasir.parallel.local import LocalRanks
from tests.examples import examples


def mesh_of(rank: int, size: int) -> Mesh:
    mesh = Mesh()
    mesh.rank, mesh.size = rank, size
    return mesh


@given(st.integers(1, 500), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 16]))
@examples(100)
def test_a_cut_has_everything_once_in_runs_of_the_unit(size, parts, unit):
    found = cut(size, parts, unit)
    assert found.size == size and found.parts == parts
    assert [i for p in range(parts) for i in range(*found.range(p))] == list(range(size))
    assert all(border % unit == 0 or border == size for border in found.borders)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_neighbouring_ranks_hold_the_same_part(size):
    for parts in (p for p in (1, 2, 4, 8) if p <= size):
        held = [mesh_of(rank, size).part(parts) for rank in range(size)]
        assert held == sorted(held) and all(held.count(p) == size // parts for p in range(parts))


def test_the_most_parts_that_fit():
    assert mesh_of(0, 8).most_parts(lambda p: 12 % p == 0) == 4
    assert mesh_of(0, 8).most_parts(lambda p: False) == 1
    assert SOLO.most_parts(lambda p: True) == 1


def test_sums_are_joined_as_segments_are():
    parts = [np.float32([x]) for x in (1.0, 2.0**-24, 2.0**-24, -1.0)]
    assert ((parts[0] + parts[1]) + parts[2]) + parts[3] == 0.0
    assert tree_sum(parts, 4) == 2.0**-24
    doubled = [part for part in parts for _ in range(2)]  # eight ranks that hold four parts
    assert tree_sum(doubled, 4) == 2.0**-24


def test_rows_by_id_keep_their_bits():
    table = cut(5, 2)
    rows = [np.float32([[-0.0], [1.0], [2.0]]), np.float32([[0.0], [0.0], [-0.0]])]
    found = picked(rows, np.array([1, 0, 4]), table)
    assert np.array_equal(found.view(np.uint32), np.float32([[-0.0], [1.0], [-0.0]]).view(np.uint32))


def test_columns_of_other_widths_lie_side_by_side():
    assert side_by_side([np.ones((2, 3)), np.ones((2, 3)), np.zeros((2, 1)), np.zeros((2, 1))], 2).shape == (2, 4)


def test_rows_of_experts_come_from_the_rank_that_has_them():
    ranks = LocalRanks(2)
    begins = np.array([0, 2, 2, 5])

    def complete(mesh: Mesh) -> np.ndarray:
        share = ExpertShare(mesh, cut(3, 2), 1)
        rows = np.full((5, 1), mesh.rank + 1.0, np.float32)
        share.complete(rows, begins)
        return rows[:, 0]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(complete, ranks.meshes))
    assert [*map(list, found)] == [[1, 1, 2, 2, 2]] * 2


@pytest.mark.parametrize("size", [0, 3, 5, 16, -1])
def test_other_numbers_of_ranks_are_refused(size):
    with pytest.raises(ConfigError, match="1, 2, 4 or 8"):
        LocalRanks(size)


def test_no_rank_waits_for_a_failed_one():
    ranks = LocalRanks(2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks.meshes[0].meet, np.zeros(1))
        ranks.abort()
        with pytest.raises(threading.BrokenBarrierError):
            waiting.result(60)
        ranks.reset()
        other = threads.submit(ranks.meshes[0].meet, np.zeros(1))
        assert [list(x) for x in ranks.meshes[1].meet(np.ones(1))] == [[0], [1]] == [list(x) for x in other.result(60)]
