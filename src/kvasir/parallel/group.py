"""Ranks of a process group of torch: NCCL between GPUs, gloo between CPUs.

The library only copies: each rank gathers the tensors of all, and combines them itself in the order of a single rank. A
library's own sum would depend on the size of the message, the topology and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

from kvasir.errors import ConfigError
from kvasir.parallel import MAX_RANKS, Mesh

# torch 2.13 has renamed it.
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class GroupRank(Mesh):
    """Rank `rank` of `size` processes, once all have called `connect`. Until then `gather_into` does nothing: rank 0
    tries its launches alone, to measure their memory. Raises ConfigError unless there are 1, 2, 4 or 8 ranks."""

    def __init__(self, rank: int, size: int):
        if size > MAX_RANKS or size & (size - 1):
            raise ConfigError(f"{size} ranks cannot share a model", "use 1, 2, 4 or 8: these keep the order of sums")
        self.rank, self.size = rank, size
        self._groups: dict[int, Any] = {}  # by the number of parts

    def connect(self, file: str, backend: str, seconds: float) -> None:
        """Waits for the other ranks. file: where they find each other; it does not exist before the first. backend:
        "nccl" or "gloo". seconds: that a rank waits for another at most."""
        distributed.init_process_group(
            backend, init_method=f"file://{file}", rank=self.rank, world_size=self.size,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        parts = self.size
        while parts > 1:
            self._groups[parts] = self._group(parts)
            parts //= 2

    def _group(self, parts: int) -> Any:
        """This rank's group of those that hold the parts of something: the first holder of each part, the second of
        each, and so on."""
        holders, own = self.size // parts, None
        for nth in range(holders):  # every rank takes part in making every group
            ranks = range(nth, self.size, holders)
            group = distributed.new_group([*ranks])
            own = group if self.rank in ranks else own
        return own

    def gather_into(self, everyones: Tensor, mine: Tensor, parts: int) -> None:
        """everyones: contiguous, gets the tensors of all parts, in their order; each is as large as `mine`."""
        if not self._groups:
            return
        _all_gather(everyones.view(-1), mine.view(-1), self._groups[parts])

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """The tensors of all ranks, by rank, each of the same shape and dtype, on the device of `mine`."""
        if self.size == 1:
            return [mine]
        assert self._groups, "the ranks have not met"
        everyones = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=mine.device)
        self.gather_into(everyones, mine.contiguous(), self.size)
        return [*everyones]

    def meet(self, mine: np.ndarray) -> Sequence[np.ndarray]:
        """As Mesh.meet, for a group of CPUs."""
        return [one.numpy() for one in self.gather(torch.from_numpy(np.ascontiguousarray(mine)))]

    def close(self) -> None:
        """Leaves the group. The others must have, or be gone."""
        if self._groups:
            self._groups = {}
            distributed.destroy_process_group()
