"""Programs of all ranks of a model in one process, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvasir.parallel.local import LocalRanks
from kvasir.program.ranks import RankedProgram
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.weights.find import find_model
from tests.program.made import program_of


def parts_of(
    folder: str | Path, size: int, dtype: str = "float32", **wish: Any
) -> tuple[LocalRanks, list[LoadedModel]]:
    """What each of `size` ranks loads of a model."""
    ranks, files = LocalRanks(size), find_model(str(folder))
    return ranks, [load_model(files, dtype, options=LoadOptions("program", mesh=mesh, **wish)) for mesh in ranks.meshes]


def ranked(ranks: LocalRanks, models: list[LoadedModel], **options: Any) -> RankedProgram:
    return RankedProgram(ranks, [program_of(model, **options) for model in models])


def ranked_of(folder: str | Path, size: int, dtype: str = "float32", **wish: Any) -> RankedProgram:
    return ranked(*parts_of(folder, size, dtype, **wish))
