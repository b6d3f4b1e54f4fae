"""A model divided by its layers, in threads of one process: the bits are those of one program, in every family."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvasir.errors import ConfigError
from kvasir.ops.attention.native import PIECE_BIDIRECTIONAL, Piece
from kvasir.ops.linear.absent import AbsentMatrix
from kvasir.parallel import Mesh
from kvasir.program import commands
from kvasir.program.commands import divide
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.staging import _balanced
from kvasir.weights.find import find_model
from tests.engine.cores import random_model
from tests.lora.kinds import everything
from tests.program.made import SMALL, program_of
from tests.program.staged import StageThreads, staged_of
from tests.program.test_adapters import made
from tests.program.test_ranks import company_of, folders, of_everything, results, same, whole

__all__ = ["folders"]  # a fixture

# One kind for each thing that crosses a border, or that a stage holds: rows alone, several streams, states, experts, a
# tied table, shared blocks, an encoder.
FEW = {"llama", "gemma4", "rwkv7", "qwen3-next", "zamba2-blocks", "mixtral", "gemma2", "bert"}
WHOLE = {"gemma3n"}  # its small form reads the caches of the first layers to the end


@pytest.fixture(autouse=True)
def in_small_parts(monkeypatch):
    monkeypatch.setattr(commands, "LEAST", 5)


class Part(Mesh):
    def __init__(self, stage: int, stages: int):
        self.stage, self.stages = stage, stages


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in SMALL]
)
def test_every_family_in_stages(tmp_path, kind):
    random_model(kind, tmp_path)
    model = whole(tmp_path)
    if kind in WHOLE:
        with pytest.raises(ConfigError, match="cannot be divided into 2 stages"):
            staged_of(tmp_path, 2)
        return
    expected = results(program_of(model), kind)
    for stages in {2, min(3, len(model.model.layers))}:
        program = staged_of(tmp_path, stages)
        program.cache.fill_(np.nan)
        assert same(results(program, kind), expected), f"{stages} stages have other bits"
        program.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gpt2", "deepseek-v2", "granite-hybrid"])
def test_stages_of_ranks(folders, kind):
    expected = results(program_of(whole(folders(kind))), kind)
    for stages, size in ((2, 2), (2, 4)):
        program = staged_of(folders(kind), stages, size)
        program.cache.fill_(np.nan)
        assert same(results(program, kind), expected)
        program.close()


def test_a_stage_holds_only_its_own_layers(tmp_path):
    random_model("gemma2", tmp_path)  # with a tied table
    model = whole(tmp_path)
    first, last = StageThreads(tmp_path, 1, 2).models[::-1]
    assert first.held + last.held - model.model.embed.weight.nbytes - model.held in range(1024), "and the last norm"
    assert isinstance(first.model.layers[1].mlp.down.weights["weight"], AbsentMatrix)
    assert isinstance(last.model.layers[0].mlp.down.weights["weight"], AbsentMatrix)
    assert first.num_parameters == last.num_parameters == model.num_parameters
    (tmp_path / "untied").mkdir()
    random_model("llama", tmp_path / "untied")
    first, last = StageThreads(tmp_path / "untied", 1, 2).models[::-1]
    assert isinstance(first.model.head.weight, AbsentMatrix) and isinstance(last.model.embed.weight, AbsentMatrix)


def test_hidden_rows_of_an_earlier_stage_reach_the_last(tmp_path):
    random_model("smollm3", tmp_path)  # three layers
    names = ("layers.0", "layers.1", "layers.2")
    model = load_model(find_model(str(tmp_path)), "float32", options=LoadOptions("program", hidden=names))
    one, many = program_of(model), StageThreads(tmp_path, 1, 3).program(names)
    assert same(results(many), results(one))
    assert all(same([many.export(name, 1)], [one.export(name, 1)]) for name in names)
    many.close()


def test_too_few_layers_are_refused(tmp_path):
    random_model("llama", tmp_path)
    with pytest.raises(ConfigError, match="cannot be divided into 3 stages: its 2 layers have 1 places"):
        load_model(find_model(str(tmp_path)), options=LoadOptions("program", mesh=Part(0, 3)))


# -- adapters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "size"), [("llama", 1), pytest.param("qwen3-moe", 2, marks=pytest.mark.slow)])
def test_adapters_on_every_slot(folders, kind, size):
    model = whole(folders(kind))
    pairs = {1: made(model.model, 1, 4), 2: made(model.model, 2, 19)}
    expected = company_of(program_of(model), pairs)
    program = staged_of(folders(kind), 2, size)
    assert same(company_of(program, pairs), expected)
    program.close()


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_adapters_of_every_kind(folders, size):
    """Changes of experts, tables, norms and biases; each stage packs its own, and all refuse what none of them has."""
    model = whole(folders("qwen3-moe"))
    given = everything(model.model, 1)
    scaled = {"embed": replace(given.tables["embed"], magnitude=np.linspace(0.5, 2, 64, dtype=np.float32))}
    given = replace(given, tables={**given.tables, **scaled})
    expected = of_everything(program_of(model), given)
    program = staged_of(folders("qwen3-moe"), 2, size)
    assert same(of_everything(program, given), expected)
    unknown = replace(given, saved={"layers.1.mlp.router.bias": np.zeros(6, np.float32)})
    with pytest.raises(ValueError, match="cannot compute"):
        program.pack_adapter(unknown)
    assert same(of_everything(program, given), expected)
    program.close()


# -- parts of a step -----------------------------------------------------------------------------------


def pieces_of(*counts: int, flags: int = 0) -> np.ndarray:
    pieces: Any = np.zeros(len(counts), np.dtype(Piece))
    pieces["row"], pieces["count"], pieces["flags"] = range(len(counts)), counts, flags
    pieces["start"] = 100
    return pieces


@pytest.mark.parametrize("counts", [(1,), (9,), (10,), (64,), (1,) * 40, (1, 1, 30, 2), (5, 5, 5), (3, 100, 1, 1)])
@pytest.mark.parametrize("stages", [2, 3, 16])
def test_parts_have_all_rows_in_their_order(counts, stages):
    pieces = pieces_of(*counts)
    found, ends = divide(pieces, stages)
    tokens = [(one["row"], one["start"] + i) for one in found for i in range(one["count"])]
    assert tokens == [(row, 100 + i) for row, count in enumerate(counts) for i in range(count)]
    assert ends[-1] == len(found) and len(ends) == max(1, min(sum(counts) // 5, 2 * stages))
    sizes = [int(found["count"][first:last].sum()) for first, last in pairwise((0, *ends))]
    assert max(sizes) - min(sizes) <= 1


def test_pieces_whose_rows_see_each_other_stay_whole():
    pieces = pieces_of(7, 1, 50, 9, flags=PIECE_BIDIRECTIONAL)
    found, ends = divide(pieces, 4)
    assert np.array_equal(found, pieces) and len(ends) > 1 and ends == sorted({*ends}) and ends[-1] == 4


def test_stages_have_about_equal_weights():
    assert _balanced([1.0] * 8, range(1, 8), 2) == (4,)
    assert _balanced([1.0] * 8, range(1, 8), 4) == (2, 4, 6)
    assert _balanced([5.0, 1.0, 1.0, 1.0, 1.0], range(1, 5), 2) == (1,)
    assert _balanced([1.0, 1.0, 1.0, 5.0], range(1, 4), 3) == (1, 3)
    assert _balanced([1.0] * 4, [3], 2) == (3,) and _balanced([1.0] * 4, [3], 3) is None
