"""Ranks that share a model: each has a runner of its own, is given the same plans, and drafts the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

from kvasir.ops import native
from kvasir.parallel import SOLO, Mesh
from kvasir.parallel.local import LocalRanks
from kvasir.plan import SamplingSpec
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.runner.load_draft import load_draft, with_own_draft
from kvasir.runner.load_head import with_head
from kvasir.weights.find import find_model
from tests.engine.cores import random_model
from tests.models import dflash_heads
from tests.models.eagle3_heads import config_of, settings, tensors_of, write
from tests.models.mtp_oracle import Oracle
from tests.models.oracle import random_ids
from tests.models.test_eagle3 import base_folder, ids_of
from tests.runner.proposing import BLOCK, Lane, generate, runner_of, shortened

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())
PROMPT = random_ids(40, 96)


def options(executor: str, mesh: Mesh = SOLO, **more) -> LoadOptions:
    return LoadOptions(executor, block_size=BLOCK, mesh=mesh, **more)


def smaller(folder: Path) -> Callable[[str, Mesh, Mesh], LoadedModel]:
    base = find_model(random_model("llama", folder))
    shortened(folder, folder / "short", 1)
    short = find_model(folder / "short")

    def load(executor: str, mesh: Mesh, own: Mesh) -> LoadedModel:
        target = load_model(base, "float32", options=options(executor, mesh))
        return load_draft(target, short, "float32", options=options(executor, own))

    return load


def own_layers(folder: Path) -> Callable[[str, Mesh, Mesh], LoadedModel]:
    Oracle.of(pytest.importorskip("transformers"), "llama", 2).save(folder)

    def load(executor: str, mesh: Mesh, own: Mesh) -> LoadedModel:
        return with_own_draft(load_model(find_model(folder), "float32", options=options(executor, mesh, mtp=True)))

    return load


def head(folder: Path) -> Callable[[str, Mesh, Mesh], LoadedModel]:
    """An EAGLE-3 head that uses the target's tables, of which each rank has a part."""
    base, s = find_model(base_folder(folder)), settings("shared-head")
    files = find_model(
        write(folder / "head", "shared-head", config_of("shared-head", s, ids_of("shared-head")), tensors_of(s))
    )

    def load(executor: str, mesh: Mesh, own: Mesh) -> LoadedModel:
        target = load_model(base, "float32", options=options(executor, mesh))
        return with_head(target, files, "float32", options=options(executor, own))

    return load


def blocks(folder: Path) -> Callable[[str, Mesh, Mesh], LoadedModel]:
    """A DFlash drafter."""
    base, s = find_model(base_folder(folder)), dflash_heads.settings("both ways")
    files = find_model(dflash_heads.write(folder / "head", dflash_heads.config_of(s), dflash_heads.tensors_of(s)))

    def load(executor: str, mesh: Mesh, own: Mesh) -> LoadedModel:
        target = load_model(base, "float32", options=options(executor, mesh))
        return with_head(target, files, "float32", options=options(executor, own))

    return load


def drafted(loaded: LoadedModel) -> list[tuple]:
    """What two sequences guess, and their answers."""
    specs = [SamplingSpec(temperature=0.8, seed=i) for i in range(2)]
    lanes = [Lane(i, PROMPT[i:], spec, 3 + i, 17) for i, spec in enumerate(specs)]
    generate(runner_of(loaded, tokens=128), lanes, 12)
    assert all(lane.drafted > lane.accepted for lane in lanes)
    return [(lane.answer, [result.proposed for result in lane.results]) for lane in lanes]


KINDS = [(smaller, False), (smaller, True), (own_layers, True), (head, False), (head, True), (blocks, True)]
CASES, SLOW = ([(kind, executor, split) for kind, split in KINDS] for executor in ("program", "eager"))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "executor", "split"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_all_ranks_draft_what_one_would(tmp_path, kind, executor, split):
    """With a drafter that is whole on every rank, and with one that is split as well."""
    load, ranks = kind(tmp_path), LocalRanks(2)
    expected = drafted(load(executor, SOLO, SOLO))

    def run(mesh: Mesh) -> list[tuple]:
        try:
            return drafted(load(executor, mesh, mesh if split else SOLO))
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(run, mesh) for mesh in ranks.meshes]
        assert [rank.result(60) for rank in running] == [expected] * 2
