"""Ranks of a process group of torch: NCCL between GPUs, gloo between CPUs.

The library only copies: each rank gathers the tensors of all, and combines them itself in the order of a single rank. A
library's own sum would depend on the size of the message, the topology and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

from kvasir.errors import ConfigError
from kvasir.parallel import MAX_RANKS, Mesh


class GroupRank(Mesh):
    """This process's rank of a group, by default of all processes. Raises ConfigError unless the group has 1, 2, 4 or 8
    ranks."""

    def __init__(self, group: Any = None):
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        if self.size > MAX_RANKS or self.size & (self.size - 1):
            raise ConfigError(
                f"{self.size} ranks cannot share a model", "use 1, 2, 4 or 8: these keep the order of sums"
            )

    def gather(self, mine: Tensor) -> Sequence[Tensor]:
        """The tensors of all ranks, by rank, each of the same shape and dtype, on the device of `mine`."""
        found = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(self.size)]
        distributed.all_gather(found, mine.contiguous(), self.group)
        return found

    def meet(self, mine: np.ndarray) -> Sequence[np.ndarray]:
        """As Mesh.meet, for a group of CPUs."""
        return [one.numpy() for one in self.gather(torch.from_numpy(np.ascontiguousarray(mine)))]
