"""A runner that drafts with a second model: what it proposes, and that answers do not depend on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.ops import native
from kvasir.plan import SamplingSpec, StepPlan
from kvasir.program import marshal, program
from kvasir.runner import program_draft, program_executor, proposals
from kvasir.runner.footprint import footprint_of
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.load_draft import load_draft
from kvasir.weights.find import find_model
from tests.engine.cores import random_model
from tests.runner.proposing import (
    BLOCK,
    Lane,
    decode,
    generate,
    renumbered,
    runner_of,
    shortened,
    step,
    watched,
)

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())
PROMPT = [(7 * i + 3) % 290 for i in range(40)]
DRAWN = SamplingSpec(temperature=1.0, seed=5)
PROGRAM = LoadOptions("program", block_size=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def target(folder):
    return load_model(find_model(folder), "float32", options=PROGRAM)


@pytest.fixture(scope="module")
def twin(target, folder):
    """The model with itself as its draft model."""
    return load_draft(target, find_model(folder), "float32", options=PROGRAM)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(target, twin, temperature):
    spec = SamplingSpec(temperature=temperature, seed=5)
    alone, drafted = Lane(0, list(PROMPT), spec), Lane(0, list(PROMPT), spec, propose=4)
    generate(runner_of(target), [alone], 30)
    generate(runner_of(twin), [drafted], 30)
    assert drafted.answer[:30] == alone.answer[:30]
    assert drafted.drafted == drafted.accepted >= 20
    assert len(drafted.results) <= 8


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_of_the_first_layers_changes_no_answer(target, folder, tmp_path, temperature):
    """Rows of a step ask for different numbers of ids, one for none; a prompt comes in chunks beside them."""
    shortened(Path(folder), tmp_path / "short", 1)
    options = {"temperature": temperature, "repetition_penalty": 1.2, "top_p": 0.95}
    specs = [SamplingSpec(seed=i, **options) for i in range(4)]
    asked, found = (0, 1, 3, 6), []
    for loaded in (target, load_draft(target, find_model(tmp_path / "short"), "float32", options=PROGRAM)):
        lanes = [Lane(i, PROMPT[i:], specs[i], asked[i] if loaded.draft else 0, (9, 40)[i % 2]) for i in range(4)]
        generate(runner_of(loaded, tokens=128), lanes, 40)
        found.append([lane.answer[:40] for lane in lanes])
    assert found[0] == found[1]
    assert [lane.drafted > 0 for lane in lanes] == [False, True, True, True]
    drafted, accepted = sum(lane.drafted for lane in lanes), sum(lane.accepted for lane in lanes)
    assert 5 / 300 * drafted < accepted < drafted, "chance alone accepts one in 300"


@pytest.fixture(scope="module")
def truth(target):
    """The ids that follow PROMPT, drawn at a temperature of 1 with the seed 5."""
    lane = Lane(0, list(PROMPT), DRAWN)
    generate(runner_of(target), [lane], 60)
    return lane.answer


def asking(row: int, ids: list[int], **options) -> Lane:
    return Lane(row, list(ids), DRAWN, prompt_len=len(PROMPT), **{"propose": 4, **options})


def test_drafts_go_on_where_a_prefix_was_computed_for_another_sequence(twin, truth):
    """The draft model's caches are in the blocks that sequences share."""
    runner = runner_of(twin)
    first = asking(0, PROMPT)
    generate(runner, [first], 10)
    second = asking(1, PROMPT, computed=2 * BLOCK, blocks=(*first.blocks[:2], *range(20, 30)))
    generate(runner, [second], 20)
    assert second.answer[:20] == truth[:20] and second.accepted == second.drafted > 10


def test_drafts_go_on_after_a_preemption(twin, truth):
    runner = runner_of(twin)
    first = asking(1, PROMPT)
    generate(runner, [first], 12)
    kept = len(first.ids) // BLOCK
    again = asking(2, first.ids, computed=kept * BLOCK, blocks=(*first.blocks[:kept], *range(40, 50)))
    generate(runner, [again], 30)
    assert again.answer[:30] == truth[:30] and again.accepted == again.drafted > 10


def test_garbage_in_the_draft_models_cache_costs_drafts_only(twin, truth, monkeypatch):
    """A prefix that the target alone has computed, in blocks full of NaN."""
    runner = runner_of(twin)
    runner.cache.fill_(float("nan"))
    first = asking(0, PROMPT, propose=0)
    with monkeypatch.context() as without:
        without.setattr(runner.proposer, "propose", lambda *args: {})
        generate(runner, [first], 5)
    second = asking(1, PROMPT, computed=2 * BLOCK, blocks=(*first.blocks[:2], *range(20, 30)))
    beside = asking(2, PROMPT)
    generate(runner, [second, beside], 20)
    assert second.answer[:20] == beside.answer[:20] == truth[:20]
    assert second.drafted == 0 and beside.accepted == beside.drafted > 10


def test_a_sequence_may_ask_after_steps_without_drafts(twin, truth, monkeypatch):
    """The draft model computes prompts as the target does, then nothing until it is asked. It computes what it lacks in
    as many steps as its buffers need, and ids that it has guessed itself only once."""
    runner = runner_of(twin, tokens=16)
    lane, seen = asking(0, PROMPT, propose=0, chunk=16), watched(runner, monkeypatch)
    while len(lane.answer) < 7:
        step(runner, [lane])
    for _ in range(10):
        decode(runner, [lane])
    assert seen == [[16], [16], [8]]
    lane.propose = 4
    while len(lane.answer) < 40:
        step(runner, [lane])
    assert lane.answer[:40] == truth[:40] and lane.accepted == lane.drafted > 10
    assert seen[3:8] == [[16], [2], [1], [1], [1]], "58 known ids, then the guesses"
    assert seen[8:] == [[2], [1], [1], [1]] * (len(seen[8:]) // 4), "the last guess and the id after it"


def test_much_that_is_lacking_is_computed_in_several_steps(twin, truth, monkeypatch):
    runner = runner_of(twin, tokens=16)
    lane, seen = asking(0, PROMPT, propose=0, chunk=16), watched(runner, monkeypatch)
    while len(lane.answer) < 43:
        step(runner, [lane])
    lane.propose = 2
    for lacking, guesses in ((18, 0), (18, 0), (10, 2)):
        before = len(seen)
        step(runner, [lane])
        assert sum(map(sum, seen[before:])) == lacking + max(0, guesses - 1) and len(lane.draft) == guesses
    step(runner, [lane])
    assert lane.accepted == lane.drafted == 2 and lane.answer == truth[: len(lane.answer)]


def test_nothing_is_drafted_for_an_embedding(twin, monkeypatch):
    runner = runner_of(twin)
    lane, seen = asking(0, PROMPT), watched(runner, monkeypatch)
    joined, work = lane.join(len(runner.capacity.groups)), replace(lane.work(), want_pooled="embed", sample=False)
    [found] = runner.sample(runner.execute(StepPlan(0, joined=(joined,), work=(work,)))).rows
    assert found.pooled and not found.proposed and seen == []


def test_there_is_no_guess_beyond_the_context_or_the_blocks(twin, truth):
    runner = runner_of(twin, longest=64)
    lane = asking(0, PROMPT, longest=64)
    while len(lane.ids) < 64:
        step(runner, [lane])
    assert lane.answer == truth[:24] and lane.accepted == lane.drafted
    runner = runner_of(twin)
    lane = asking(0, PROMPT, blocks=(3, 4, 5))
    while len(lane.ids) < 3 * BLOCK:
        step(runner, [lane])
        assert len(lane.draft) <= max(0, 3 * BLOCK - len(lane.ids) + 1)
    assert lane.drafted == lane.accepted > 3 and not lane.draft


def test_guesses_end_with_an_id_that_ends_the_sequence(twin, truth):
    lane = Lane(0, list(PROMPT), replace(DRAWN, stop_ids=(truth[2],)), propose=8)
    step(runner_of(twin), [lane])
    assert truth[:3] == [*lane.answer, *lane.draft] and truth[2] not in truth[:2]


@pytest.mark.parametrize("overlap", [False, True])
def test_more_rows_than_logits_at_a_time(twin, truth, monkeypatch, overlap):
    for module in (marshal, program, program_draft, program_executor):
        monkeypatch.setattr(module, "MAX_CHOSEN", 3)
    monkeypatch.setattr(proposals, "MAX_DRAWN", 3)
    lanes = [asking(i, PROMPT, propose=2) for i in range(4)]
    generate(runner_of(twin, tokens=256, overlap=overlap), lanes, 20)
    assert all(lane.answer[:20] == truth[:20] and lane.accepted == lane.drafted > 5 for lane in lanes)


def test_a_draft_model_with_other_ids(target, truth, folder, tmp_path):
    """The same model under other numbers is always right; where it lacks tokens, it is not."""
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    renumbered(Path(folder), tmp_path / "other", order)
    files, shared = find_model(tmp_path / "other"), np.argsort(order.numpy()).astype(np.int32)
    found = []
    for lacking in (0, 60):
        shared[300 - lacking :] = -1
        loaded = load_draft(target, files, "float32", options=PROGRAM, shared=shared, unknown=int(order[0]))
        lane = asking(0, PROMPT)
        generate(runner_of(loaded), [lane], 40)
        assert lane.answer[:40] == truth[:40]
        assert all(token < 300 - lacking for result in lane.results for token in result.proposed)
        found.append(lane.accepted / lane.drafted)
    assert found[0] == 1.0 and 0.05 < found[1] < 0.95
    shared[99:] = -1
    with pytest.raises(ConfigError, match="99 tokens in common"):
        load_draft(target, files, "float32", options=PROGRAM, shared=shared)


def test_ids_that_a_grammar_forces_are_guessed_without_the_draft_model(target, folder):
    """It has no such token. Where several are allowed and it has none, the guesses end."""
    shared = np.where(np.arange(300) < 200, np.arange(300), -1).astype(np.int32)
    loaded = load_draft(target, find_model(folder), "float32", options=PROGRAM, shared=shared)
    lane, runner = asking(0, PROMPT, propose=6), runner_of(loaded)
    lane.spec = replace(DRAWN, guided=True)
    places = {1: (250,), 2: range(10, 20), 3: (3, 299), 4: (299,), 5: range(200, 300)}

    def ahead(row: int, ids: list[int]) -> bytes:
        assert len(ids) == len(asked) + 1
        asked.append(list(ids))
        return sum(1 << i for i in places[len(ids)]).to_bytes(40, "little")

    asked: list[list[int]] = []
    joined = lane.join(len(runner.capacity.groups))
    pending = runner.execute(StepPlan(0, joined=(joined,), work=(lane.work(),)))
    [found] = runner.sample(pending, {0: b"\xff" * 40}, ahead).rows
    first, second, third, fourth = found.proposed
    assert (first, third, fourth) == (250, 3, 299) and 10 <= second < 20
    assert asked[-1] == [*found.tokens, 250, second, 3, 299]


@pytest.mark.parametrize("size", [280, 320])
def test_a_draft_model_with_fewer_or_more_of_the_same_ids(target, truth, folder, tmp_path, size):
    """Vocabularies are padded to different sizes. Beyond the target's ids, nothing is drafted."""
    renumbered(Path(folder), tmp_path / "other", torch.arange(size) % 300)
    loaded = load_draft(target, find_model(tmp_path / "other"), "float32", options=PROGRAM)
    lane = asking(0, PROMPT)
    generate(runner_of(loaded), [lane], 40)
    assert lane.answer[:40] == truth[:40]
    assert lane.accepted == lane.drafted > 10 if size > 300 else 0 < lane.accepted < lane.drafted


@pytest.mark.parametrize("kind", ["qwen3-next", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_models_with_states_or_windows_draft(kind, tmp_path):
    files = find_model(random_model(kind, tmp_path))
    target = load_model(files, "float32", options=PROGRAM)
    expected = Lane(0, list(PROMPT), DRAWN)
    generate(runner_of(target), [expected], 40)
    lane, runner = (
        Lane(0, list(PROMPT), DRAWN, propose=3),
        runner_of(load_draft(target, files, "float32", options=PROGRAM)),
    )
    generate(runner, [lane], 20)
    again = Lane(
        1, lane.ids, DRAWN, 3, prompt_len=len(PROMPT), computed=3 * BLOCK, blocks=(*lane.blocks[:3], *range(40, 50))
    )
    generate(runner, [again], 40)
    assert again.answer[:40] == expected.answer[:40]
    assert (lane.accepted, again.accepted) == (lane.drafted, again.drafted) and again.drafted > 5


def test_the_eager_executor_drafts_with_a_second_model(folder, tmp_path):
    """Another order of ids, so that all tables are used; first of the whole model, then of its first layer."""
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    renumbered(Path(folder), tmp_path / "other", order)
    shortened(tmp_path / "other", tmp_path / "short", 1)
    shared, options = np.argsort(order.numpy()).astype(np.int32), LoadOptions("eager", block_size=16)
    alone = load_model(find_model(folder), "float32", options=options)
    expected, found = Lane(0, list(PROMPT), DRAWN), []
    generate(runner_of(alone), [expected], 20)
    for name in ("other", "short"):
        loaded = load_draft(alone, find_model(tmp_path / name), "float32", shared=shared, unknown=3)
        lane = Lane(0, list(PROMPT), DRAWN, propose=3, chunk=30)
        generate(runner_of(loaded), [lane], 20)
        assert lane.answer[:20] == expected.answer[:20]
        found.append(lane.accepted / lane.drafted)
    assert found[0] == 1.0 > found[1]
    assert footprint_of(loaded, **SIZES).buffers > footprint_of(alone, **SIZES).buffers


def test_a_runner_without_a_draft_model_refuses_to_propose(target):
    lane = Lane(0, list(PROMPT), propose=1)
    with pytest.raises(AssertionError, match=r"Work\.propose"):
        step(runner_of(target), [lane])


SIZES: Any = {"kind": "cpu", "tokens": 64, "rows": 4, "threads": 1, "block_size": BLOCK, "kv_dtype": "float32"}


def test_the_drafts_memory_is_counted(target, twin):
    alone, both, runner = footprint_of(target, **SIZES), footprint_of(twin, **SIZES), runner_of(twin)
    assert runner.proposer
    forward: Any = runner.proposer.forward
    assert both.buffers == forward.target.num_bytes + forward.num_bytes > alone.buffers
    assert both.weights == 2 * alone.weights and both.angles == 2 * alone.angles
    sizes = zip(runner.capacity.groups, runner.capacity.num_blocks, strict=True)
    assert sum(t.nbytes for t in runner.cache.tensors) == sum(group.bytes_per_block * n for group, n in sizes)
