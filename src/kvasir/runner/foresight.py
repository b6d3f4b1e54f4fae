"""What each process of a model will hold, found without a process and without reading weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvasir.models.registry import model_class_for
from kvasir.parallel import Mesh
from kvasir.runner.allotment import Needs, needs_of
from kvasir.runner.load import split
from kvasir.runner.packing import Packer
from kvasir.runner.staging import divide
from kvasir.runner.weight_sizes import weight_bytes
from kvasir.weights.source import WeightSource


class _Place(Mesh):
    """A place of a mesh, whose ranks never meet."""

    def __init__(self, rank: int, size: int, stage: int, stages: int):
        self.rank, self.size, self.stage, self.stages = rank, size, stage, stages


def foresee(config: Mapping[str, Any], source: WeightSource, dtype: str, size: int = 1, stages: int = 1) -> list[Needs]:
    """The needs of `size` ranks in each of `stages`, stage by stage. Raises ConfigError if the model has too few layers
    for them, UnsupportedModel, or ModelFileError."""
    kind: Any = model_class_for(config)
    found = []
    for stage in range(stages):
        for rank in range(size):
            mesh, packer, sizes = _Place(rank, size, stage, stages), Packer(dtype), Counter[int]()
            model = kind(kind.Config.from_hf(config))
            if stages > 1:
                packer.leave_out = divide(kind(kind.Config.from_hf(config)), source, mesh, False).leaves_out(model)
            if size > 1:
                split(model, mesh, source, dtype, packer)
            found.append(needs_of(model, weight_bytes(model, source, dtype, packer, sizes), sizes))
    return found
