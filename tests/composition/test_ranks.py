"""Ranks beside other features: as processes, or as a program that several ranks share in the place of the engine's own.
The answers are those of one rank. A sum that goes over the ranks in another order must turn its cell red."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="transformers names the tensors of random models")
pytest.importorskip("gguf", reason="gguf writes one of the models")

from kvasir.ops import native
from kvasir.program import commands, meetings
from tests.composition import models
from tests.composition.cells import Cell
from tests.composition.features import FEATURES
from tests.engine.test_oracle_ranks import share

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")

# (ranks, model, features)
CELLS: list[Any] = [
    (4, "llama", ("chunks of 13", "tiny pool", "drafts", "float32")),
    (2, "kvasir-mini", ("forced preemption", "grammar: schema", "KV int8", "restart")),
    (2, "llama", ("forced preemption", "adapters summed", "float32")),
]
SLOW = [
    (8, "qwen3-moe", ("neighbours", "mirostat", "prompt logprobs", "float32")),
    (4, "mixtral", ("abort of neighbours", "steps of 29 tokens", "n")),
    (4, "mixtral", ("chunks of 13", "adapter: everything")),
    (8, "gemma3", ("forced preemption", "chunks of 1", "repetition window", "KV float32")),
]
ALL = [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW)]


def ran(size: int, model: str, features: tuple[str, ...]) -> str:
    programs = []

    def shared(core: Any) -> None:
        dtype = "float32" if "float32" in features else "bfloat16"
        programs.append(share(core, models.options(model)["model"], size, dtype))
        core.runner.cache.fill_(np.nan)

    found = Cell((*features, model)).run(shared)
    assert all(program.seconds > 0 for program in programs[:1])
    return found.word


class Processes(Cell):
    """A cell of an engine whose ranks, or stages of ranks, are processes."""

    def __init__(self, size: int, *names: str, stages: int = 1):
        super().__init__(names)
        self.size, self.stages = size, stages

    @property
    def refused(self) -> bool:
        return super().refused or any(feature.name in REFUSED for feature in self.features)

    def options(self) -> dict[str, Any]:
        options = super().options()
        count = self.size * self.stages
        shared = {"tensor_parallel": self.size, "pipeline_parallel": self.stages}
        return {**options, **shared, "threads": max(count, options["threads"])}


# What ranks refuse by name.
REFUSED = {"eager executor"}
# What the cell counts is of one process, or of ranks of its own, or it needs options for these ranks.
ELSEWHERE = {"NaN in free blocks", "2 threads", "3 threads", "ranks: 2", "stages: 2", "streamed weights"}
FAST = ("adapters summed",)


def is_shared(core: Any) -> None:
    assert any(" ranks of " in line or " stages of " in line for line in core.summary)


@pytest.mark.parametrize(
    "name",
    [
        f.name if f.name in FAST else pytest.param(f.name, marks=pytest.mark.slow)
        for f in FEATURES
        if f.name not in ELSEWHERE
    ],
)
def test_every_feature_beside_processes(name):
    cell = Processes(2, name)
    assert cell.run(is_shared).word == ("refused" if cell.refused else "equal")


@pytest.mark.slow
@pytest.mark.parametrize("name", [f.name for f in FEATURES if f.name not in ELSEWHERE])
def test_every_feature_beside_stages(name, monkeypatch):
    monkeypatch.setattr(commands, "LEAST", 5)  # most steps have several parts
    cell = Processes(1, name, stages=2)
    assert cell.run(is_shared).word == ("refused" if cell.refused else "equal")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (4, ("llama", "forced preemption", "adapters summed", "float32", "overlap")),
        (8, ("qwen3-moe", "neighbours", "mirostat", "prompt logprobs", "KV int8")),
        (2, ("mixtral", "abort of neighbours", "steps of 29 tokens", "n", "restart")),
    ],
)
def test_processes_beside_several_features(size, names):
    assert Processes(size, *names).run(is_shared).word == "equal"


@pytest.mark.parametrize(("size", "model", "features"), ALL)
def test_answers_are_those_of_one_rank(size, model, features):
    assert ran(size, model, features) == "equal"


def test_a_sum_that_goes_from_rank_to_rank_is_found(monkeypatch):
    """As libraries of collectives add, instead of by the tree of the segments."""
    monkeypatch.setattr(meetings, "tree_sum", lambda everyones, parts: sum(everyones[:: len(everyones) // parts]))
    with pytest.raises(AssertionError, match="differ"):
        ran(*CELLS[0])
