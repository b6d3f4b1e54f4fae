"""Ranks over shared memory, in threads of one process, for tests."""

from __future__ import annotations

import os

from kvasir.program.shared import SharedRank, memory_file, segment_bytes


class SharedRanks:
    """As LocalRanks."""

    def __init__(self, size: int, seconds: float = 60.0):
        self.size = size
        fd = memory_file("test", segment_bytes(size))
        self.meshes = [SharedRank(fd, rank, size, seconds=seconds) for rank in range(size)]
        os.close(fd)

    def abort(self) -> None:
        self.meshes[0].abort()

    def reset(self) -> None:
        assert not self.meshes[0].aborted
