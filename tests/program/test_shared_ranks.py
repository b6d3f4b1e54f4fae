"""Ranks that meet in shared memory: the bits are those of one rank, and of ranks that meet in Python."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvasir.lora import Adapter, LowRank
from kvasir.plan import Adapted
from kvasir.program import lower
from kvasir.program.native import OP
from kvasir.program.shared import SUM, SharedRank
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model
from tests.lora.kinds import everything
from tests.program.made import SMALL, Company, program_of
from tests.program.ranked import parts_of, ranked
from tests.program.shared_ranks import SharedRanks
from tests.program.test_adapters import made
from tests.program.test_ranks import (
    FEW,
    IDS,
    SIZES,
    company_of,
    folders,
    results,
    same,
    whole,
)

__all__ = ["folders"]  # a fixture


def shared_of(folder: Any, size: int, dtype: str = "float32", **options: Any) -> Any:
    ranks, files = SharedRanks(size), find_model(str(folder))
    return ranked(
        ranks,  # type: ignore[arg-type]
        [load_model(files, dtype, options=LoadOptions("program", mesh=mesh)) for mesh in ranks.meshes],
        **options,
    )


def local_of(folder: Any, size: int, **options: Any) -> Any:
    return ranked(*parts_of(folder, size), **options)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in SMALL]
)
def test_every_family_in_2_4_and_8_ranks(folders, kind):
    expected = results(program_of(whole(folders(kind))), kind)
    for size in SIZES:
        program = shared_of(folders(kind), size)
        program.cache.fill_(np.nan)
        assert same(results(program, kind), expected), f"{size} ranks have other bits"
        ops = [instr.op for instr in program.lead.marshal.instrs]
        has = {one.op for one in program.lowered.instructions} & {*lower.COLLECTIVES}
        assert OP["call"] not in ops or kind == "bert", "nothing is done in Python"
        assert (OP["meet"] in ops) == bool(has)
        program.close()


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_adapters_on_every_slot(folders, kind):
    model = whole(folders(kind))
    pairs = {1: made(model.model, 1, 4), 2: made(model.model, 2, 19)}
    expected = company_of(program_of(model), pairs)
    for size in (2, 8):
        program = shared_of(folders(kind), size)
        assert same(company_of(program, pairs), expected)
        program.close()


def changed(program: Any, adapters: Any) -> list[np.ndarray]:
    """Hidden rows of three sequences, of which two have adapters: more rows than a pass of the experts has."""
    for id, adapter in enumerate(adapters, 1):
        program.set_adapter(id, program.pack_adapter(adapter))
    rows = [Adapted(1), Adapted(2, 0.5, 7)], [Adapted(2, -1.0)], []
    found = Company(program, [IDS[:45]] * 3, rows).step(*((row, 0, 45) for row in range(3)))
    program.close()
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_adapters_of_experts_of_which_ranks_have_parts(folders, threads):
    """In shared memory and in Python, several adapters of a row, all with magnitudes and biases."""
    model = whole(folders("mixtral"))
    given = [with_vectors(everything(model.model, seed, rank)) for seed, rank in ((1, 5), (2, 20))]
    without = [
        replace(one, matrices={name: x for name, x in one.matrices.items() if not name.endswith("down")})
        for one in given
    ]
    expected = changed(program_of(model, rows=256), given)
    assert not same(changed(program_of(model, rows=256), without), expected)
    for of in (shared_of, local_of)[: 3 - threads]:
        assert same(changed(of(folders("mixtral"), 8, rows=256, threads=threads), given), expected)


def with_vectors(adapter: Adapter) -> Adapter:
    def of(change: LowRank) -> LowRank:
        outputs = np.linspace(0.5, 1.5, len(change.b), dtype=np.float32)
        return replace(change, magnitude=outputs, bias=outputs[::-1] / 8)

    return replace(adapter, matrices={name: of(change) for name, change in adapter.matrices.items()})


def test_several_threads_of_each_rank(folders):
    expected = results(program_of(whole(folders("mixtral"))))
    ranks = SharedRanks(2)
    files = find_model(str(folders("mixtral")))
    models = [load_model(files, "float32", options=LoadOptions("program", mesh=mesh)) for mesh in ranks.meshes]
    program = ranked(ranks, models, threads=3)  # type: ignore[arg-type]
    assert same(results(program), expected)
    program.close()


def test_a_sum_of_fewer_parts_has_other_bits(folders, monkeypatch):
    """As if neighbors held the same part."""
    expected = results(program_of(whole(folders("llama"))))
    meeting = SharedRank.meeting

    def halved(mesh: Any, kind: int, width: int, parts: int, *rest: Any, **more: Any) -> Any:
        return meeting(mesh, kind, width, parts // 2 if kind == SUM else parts, *rest, **more)

    monkeypatch.setattr(SharedRank, "meeting", halved)
    program = shared_of(folders("llama"), 2)
    assert not same(results(program), expected)
    program.close()


# -- meetings of arrays --------------------------------------------------------------------------------


def test_arrays_of_any_type_and_of_other_lengths_are_exchanged():
    ranks = SharedRanks(4)

    def meet(mesh: Any) -> list[list[np.ndarray]]:
        given = [np.full((2, 3), mesh.rank, np.float32), np.arange(mesh.rank * 5, dtype=np.int16).reshape(-1, 5)]
        return [list(mesh.meet(one)) for one in given]

    with ThreadPoolExecutor(4) as threads:
        for same_sizes, others in threads.map(meet, ranks.meshes):
            assert [one.tolist() for one in same_sizes] == [[[rank] * 3] * 2 for rank in range(4)]
            assert [one.shape for one in others] == [(rank, 5) for rank in range(4)]
            assert all(one.dtype == np.int16 and one.ravel().tolist() == [*range(one.size)] for one in others)


def test_no_rank_waits_once_they_are_aborted():
    ranks = SharedRanks(2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks.meshes[0].meet, np.zeros(1))
        ranks.meshes[1].abort()
        with pytest.raises(ConnectionError, match="gone"):
            waiting.result(60)
    assert ranks.meshes[0].aborted and not ranks.meshes[0].settle() and not ranks.meshes[1].next()


def test_a_wait_has_a_limit():
    ranks = SharedRanks(2, seconds=0.1)
    with pytest.raises(ConnectionError, match="gone"):
        ranks.meshes[0].meet(np.zeros(1))
