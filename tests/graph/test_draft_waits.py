"""How often the host waits for the device while a model drafts on the graph executor: once for the ids of a step, and
once for all proposals after it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from torch import Tensor

from kvasir.plan import SamplingSpec
from kvasir.runner import graph_draft, graph_sampling
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.runner.load_draft import load_draft, with_own_draft
from kvasir.runner.load_head import with_head
from kvasir.weights.find import find_model
from tests.graph.models import folder_of
from tests.models.eagle3_heads import config_of, settings, tensors_of, write
from tests.models.mtp_oracle import Oracle
from tests.models.test_eagle3 import base_folder, ids_of
from tests.runner.proposing import BLOCK, Lane, runner_of, step
from tests.runner.test_dflash import drafting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPT = [(7 * i + 3) % 90 for i in range(12)]
GRAPH = LoadOptions("graph", block_size=BLOCK)
DRAWN = SamplingSpec(temperature=0.8, seed=6, repetition_penalty=1.2, top_p=0.9)
ON_HOST = SamplingSpec(temperature=0.9, seed=7, mirostat=2)


def drafter(kind: str, folder: Any) -> LoadedModel:
    """A model with a drafter of the kind."""
    if kind == "mtp":
        Oracle.of(pytest.importorskip("transformers"), "llama", 2).save(folder)
        options = LoadOptions("graph", block_size=BLOCK, mtp=True)
        return with_own_draft(load_model(find_model(folder), "float32", options=options))
    target = load_model(find_model(base_folder(folder)), "float32", options=GRAPH)
    if kind == "eagle3":
        s, layout = settings("specforge"), "specforge"
        head = write(folder / "head", layout, config_of(layout, s, ids_of(layout)), tensors_of(s))
        return with_head(target, find_model(head), "float32", options=GRAPH)
    return drafting(target, folder, kind)


def twin(folder: Any) -> LoadedModel:
    """A model that drafts for itself."""
    files = find_model(folder_of(folder, "llama", vocab_size=128))
    return load_draft(load_model(files, "float32", options=GRAPH), files, "float32", options=GRAPH)


@pytest.fixture
def waits(monkeypatch) -> list[int]:
    """A list with an item for each copy to the host, however it is made."""
    found: list[int] = []
    for module in (graph_draft, graph_sampling):
        monkeypatch.setattr(module, "fetch", lambda tensors, fetch=module.fetch: found.append(1) or fetch(tensors))
    for name in ("cpu", "item", "tolist"):
        copy = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda tensor, copy=copy: found.append(1) or copy(tensor))
    return found


@pytest.mark.parametrize("kind", ["draft model", "eagle3", "mtp", "qwen3"])
def test_the_host_waits_once_for_all_proposals(tmp_path, waits, kind):
    """Greedy, and with filters and penalties: after the prompts, and after steps that check drafts."""
    runner = runner_of(twin(tmp_path) if kind == "draft model" else drafter(kind, tmp_path), longest=64)
    lanes = [Lane(i, PROMPT[i:], spec, 4, longest=64) for i, spec in enumerate((SamplingSpec(), DRAWN))]
    for _ in range(3):
        waits.clear()
        step(runner, lanes)
        assert min(len(lane.draft) for lane in lanes) > 1 and len(waits) == 2
    for lane in lanes:
        lane.propose = 0
    waits.clear()
    step(runner, lanes)
    assert len(waits) == 1


def test_a_row_that_is_sampled_on_the_host_waits_for_each_of_its_guesses(tmp_path, waits):
    """And changes nothing of the others."""
    runner = runner_of(twin(tmp_path), longest=64)
    lanes = [Lane(i, list(PROMPT), spec, 3, longest=64) for i, spec in enumerate((DRAWN, ON_HOST))]
    for _ in range(3):
        waits.clear()
        step(runner, lanes)
        assert len(waits) > 1 + 3
    alone = Lane(2, list(PROMPT), DRAWN, 3, longest=64)
    for _ in range(3):
        step(runner, [alone])
    assert lanes[0].answer == alone.answer and lanes[0].accepted == alone.accepted == 6


def test_a_draft_ends_with_a_stop_id_that_the_host_sees_later(tmp_path):
    """What was guessed after it is forgotten, and later guesses are right again."""
    runner = runner_of(twin(tmp_path), longest=64)
    whole = Lane(0, list(PROMPT), DRAWN, 4, longest=64)
    step(runner, [whole])
    assert len(set(whole.draft)) == 4
    stops = SamplingSpec(temperature=0.8, seed=6, repetition_penalty=1.2, top_p=0.9, stop_ids=whole.draft[1:2])
    stopped = Lane(1, list(PROMPT), stops, 4, longest=64)
    step(runner, [stopped])
    assert stopped.draft == whole.draft[:2]
    for _ in range(3):
        step(runner, [whole, stopped])
    assert stopped.answer == whole.answer[: len(stopped.answer)]
    assert stopped.drafted == stopped.accepted > 6 and whole.drafted == whole.accepted == 12
