"""The processors of processes that compute together."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.device import memory_nodes, shares


def nodes(*counts: int) -> list[list[int]]:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return [[*range(first, last)] for first, last in pairwise(ends)]


@pytest.mark.parametrize(
    ("counts", "size", "expected"),
    [
        ((4,), 2, [[0, 1], [2, 3]]),
        ((3,), 2, [[0], [1, 2]]),
        ((4, 4), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((4, 4), 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ((2, 2, 2, 2), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((2,), 4, [[0], [1], [0], [1]]),
        ((1, 1), 4, [[0], [0], [1], [1]]),
    ],
)
def test_ranks_get_whole_nodes_or_parts_of_one(counts, size, expected):
    assert shares(nodes(*counts), size) == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([1, 2, 4, 8]))
def test_each_rank_has_processors_and_each_processor_a_rank_if_there_are_enough(counts, size):
    there = nodes(*counts)
    found = shares(there, size)
    assert len(found) == size and all(found)
    if len(there) >= size or all(count >= size for count in counts):
        assert sorted(p for share in found for p in share) == [*range(sum(counts))]


def test_nodes_are_read_from_the_system(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 9, 12}, raising=False)
    for number, text in (("0", "0-3"), ("10", "8-11,12"), ("2", "4-7"), ("3", "20-30")):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    assert memory_nodes(tmp_path) == [[0, 1], [4], [9, 12]]
    assert memory_nodes(tmp_path / "nowhere") == [[0, 1, 4, 9, 12]]
    (tmp_path / "devices/system/node/node0/cpulist").write_text("?")
    assert memory_nodes(tmp_path) == [[0, 1, 4, 9, 12]]
