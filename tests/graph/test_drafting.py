"""Models that draft on the graph executor: their guesses, and that no answer depends on them."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch

from kvasir.errors import ConfigError
from kvasir.plan import SamplingSpec, StepPlan, Work
from kvasir.runner.footprint import footprint_of
from kvasir.runner.graph_blocks import GraphBlocks
from kvasir.runner.graph_draft import GraphDraft
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.load_draft import load_draft, with_own_draft
from kvasir.runner.load_head import with_head
from kvasir.weights.find import find_model
from tests.engine.cores import random_model
from tests.graph.models import folder_of, graph_core
from tests.models.eagle3_heads import config_of, settings, tensors_of, write
from tests.models.mtp_oracle import Oracle
from tests.models.test_eagle3 import base_folder, ids_of
from tests.models.test_gemma4_assistant import both, dummies, expected, made
from tests.oracle import plain, same, together
from tests.runner.made import request
from tests.runner.proposing import BLOCK, Lane, generate, renumbered, runner_of, shortened, step
from tests.runner.test_dflash import drafting
from tests.runner.test_dflash import guessed as of_block
from tests.runner.test_eagle3 import guessed

PROMPT = [(7 * i + 3) % 90 for i in range(12)]
GRAPH = LoadOptions("graph", block_size=BLOCK)
SPECS = [
    SamplingSpec(temperature=0.8, seed=6, repetition_penalty=1.2, top_p=0.9),
    SamplingSpec(temperature=0.9, seed=7, mirostat=2),
]
SIZES: Any = {"kind": "cpu", "tokens": 64, "rows": 4, "threads": 1, "block_size": BLOCK, "kv_dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("llama"), "llama", vocab_size=128)


@pytest.fixture(scope="module")
def target(folder):
    return load_model(find_model(folder), "float32", options=GRAPH)


@pytest.fixture(scope="module")
def twin(target, folder):
    """The model with itself as its draft model."""
    return load_draft(target, find_model(folder), "float32", options=GRAPH)


def answers(loaded, asked, tokens=8) -> list[Lane]:
    """Two sequences that run together, one sampled on the device and one on the host; a prompt comes in chunks."""
    lanes = [Lane(i, PROMPT[i:], SPECS[i], count, (8, 40)[i], longest=64) for i, count in enumerate(asked)]
    generate(runner_of(loaded, longest=64), lanes, tokens)
    return lanes


@pytest.fixture(scope="module")
def alone(target):
    return [lane.answer[:8] for lane in answers(target, (0, 0))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_that_drafts_for_itself_is_always_right(twin, alone):
    lanes = answers(twin, (3, 2))
    assert [lane.answer[:8] for lane in lanes] == alone
    assert all(lane.drafted == lane.accepted > 3 for lane in lanes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_guesses_are_drawn_under_masks(twin):
    """On the device and on the host: multiples of three, and only one of the second sequence."""
    runner, specs = runner_of(twin, longest=64), [replace(spec, guided=True) for spec in SPECS]
    lanes = [Lane(i, list(PROMPT), spec, propose=3, longest=64) for i, spec in enumerate(specs)]
    allowed = np.packbits(np.arange(128) % 3 == 0, bitorder="little").tobytes()
    plan = StepPlan(0, joined=tuple(lane.join(1) for lane in lanes), work=tuple(lane.work() for lane in lanes))
    found = runner.sample(runner.execute(plan), {}, lambda row, ids: b"" if row == 1 and len(ids) > 1 else allowed)
    assert [len(row.proposed) for row in found.rows] == [3, 1]
    assert all(token % 3 == 0 for row in found.rows for token in row.proposed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wrong_guesses_in_another_vocabulary_change_no_answer(target, folder, alone, tmp_path):
    """The first layer under other numbers, without a part of the tokens."""
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    shortened(Path(folder), tmp_path / "short", 1)
    renumbered(tmp_path / "short", tmp_path / "other", order)
    shared = np.argsort(order.numpy()).astype(np.int32)
    shared[110:] = -1
    files = find_model(tmp_path / "other")
    loaded = load_draft(target, files, "bfloat16", options=GRAPH, shared=shared, unknown=int(order[0]))
    lanes = answers(loaded, (3, 2))
    assert [lane.answer[:8] for lane in lanes] == alone
    guesses = [token for lane in lanes for result in lane.results for token in result.proposed]
    assert len(guesses) > 8 and max(guesses) < 110
    assert all(lane.accepted < lane.drafted for lane in lanes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_layers_of_a_head_propose_what_they_predict(tmp_path):
    """Two layers, of which the last one draws the third guess; after a prompt in chunks, then after each step."""
    oracle = Oracle.of(pytest.importorskip("transformers"), "llama", 2)
    oracle.save(tmp_path)
    options = LoadOptions("graph", block_size=BLOCK, mtp=True)
    loaded = with_own_draft(load_model(find_model(tmp_path), "float32", options=options))
    runner, lane = runner_of(loaded, longest=64), Lane(0, list(PROMPT), propose=3, chunk=7, longest=64)
    for _ in range(4):
        step(runner, [lane])
        if lane.answer:
            assert list(lane.draft) == oracle.guesses(lane.ids, 3)
    assert lane.drafted > lane.accepted, "no guess was wrong"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["specforge", "eagle-3.1", "shared-head"])
def test_an_eagle3_head_proposes_what_it_would_in_plain_torch(tmp_path, layout):
    """With a draft vocabulary, with norms of each of the joined rows, and with the target's table of logits."""
    s, base = settings(layout), base_folder(tmp_path)
    head = find_model(write(tmp_path / "head", layout, config_of(layout, s, ids_of(layout)), tensors_of(s)))
    target = load_model(find_model(base), "float32", options=GRAPH)
    loaded = with_head(target, head, "float32", options=GRAPH)
    assert loaded.draft is not None and loaded.held > target.held
    runner, lane = runner_of(loaded, longest=64), Lane(0, list(PROMPT), propose=3, longest=64)
    for _ in range(2):
        step(runner, [lane])
        assert list(lane.draft) == guessed(layout, lane.ids, 3, loaded.draft.taps)


BLOCKS = ["qwen3", "sliding", "both ways", "mixed", "dspark", "dspark gated", "dspark rnn", "bonus"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", BLOCKS)
def test_a_drafter_of_blocks_proposes_what_it_would_in_plain_torch(tmp_path, variant):
    """After a prompt in chunks, and again after a step that has refused its first proposals."""
    loaded = drafting(load_model(find_model(base_folder(tmp_path)), "float32", options=GRAPH), tmp_path, variant)
    assert loaded.draft is not None
    runner, lane = runner_of(loaded, longest=64), Lane(0, list(PROMPT), propose=4, chunk=7, longest=64)
    while not lane.answer:
        step(runner, [lane])
    for _ in range(2):
        assert list(lane.draft) == of_block(variant, lane.ids, 4, loaded.draft.taps)
        step(runner, [lane])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_blocks_of_several_sequences_change_no_answer(tmp_path):
    """Drawn on the device and on the host, with a Markov head whose state each sequence keeps."""
    target = load_model(find_model(base_folder(tmp_path)), "float32", options=GRAPH)
    alone = [lane.answer[:8] for lane in answers(target, (0, 0))]
    lanes = answers(drafting(target, tmp_path, "dspark rnn", dtype="bfloat16"), (6, 3))
    assert [lane.answer[:8] for lane in lanes] == alone
    assert all(lane.drafted > lane.accepted for lane in lanes)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3", "dspark rnn"])
def test_all_launches_of_a_drafter_of_blocks_are_recorded(tmp_path, variant):
    loaded = drafting(load_model(find_model(base_folder(tmp_path)), "float32", options=GRAPH), tmp_path, variant)
    runner = runner_of(loaded)
    assert runner.proposer and isinstance(runner.proposer.forward, GraphBlocks)
    names = [{name for name, _ in replays._all()} for replays in runner.proposer.forward.replays]
    assert names == [{"rows", "chosen"}, {"rows"}, {"rows", "chosen"}][: 2 + (variant != "qwen3")]
    launched = {launch.kernel.__name__ for replays in runner.proposer.forward.replays for launch in replays.launches()}
    assert {"_store_kv", "_attend"} <= launched and ("take_columns_kernel" in launched) == (variant != "qwen3")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_an_assistant_of_gemma_4_proposes_what_transformers_would(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs, assistant, _ = made(transformers, "gemma4")
    base, head = map(find_model, both(transformers, tmp_path))
    loaded = with_head(load_model(base, "float32", options=GRAPH), head, "float32", options=GRAPH)
    runner, lane = runner_of(loaded, longest=64), Lane(0, list(PROMPT), propose=3, chunk=7, longest=64)
    for _ in range(3):
        step(runner, [lane])
        if lane.answer:
            logits = [logits for logits, _ in expected(theirs, assistant, lane.ids, 3)]
            assert list(lane.draft) == [int(one.argmax()) for one in logits]
    assert len(lane.answer) > 1


def test_an_assistant_of_gemma_4_reads_the_cache_and_writes_nothing_into_it(tmp_path):
    base, head = map(find_model, dummies(tmp_path))
    alone = load_model(base, "float32", options=GRAPH)
    loaded = with_head(alone, head, "float32", options=GRAPH)
    assert loaded.held > alone.held
    runners = [runner_of(model, longest=64) for model in (alone, loaded)]
    assert len({tuple(tensor.nbytes for tensor in runner.cache.tensors) for runner in runners}) == 1
    proposer = runners[1].proposer
    assert proposer and isinstance(proposer.forward, GraphDraft)
    [replays] = proposer.forward.replays
    names = {launch.kernel.__name__ for launch in replays.launches()}
    assert "_attend" in names and not names & {"_store_kv", "_rope_store"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_engine_drafts_and_answers_as_without(folder):
    requests = [request(str(i), PROMPT[i:], seed=i, max_tokens=8, temperature=0.5 * i) for i in range(2)]
    expected = plain(graph_core(folder, speculate="off"), requests)
    core: Any = graph_core(folder, speculate=f"draft={folder}", overlap=True)
    looks, followed = count(), []
    core.scheduler.drafter.pays = lambda rows, predicted: next(looks) % 6 < 3
    follows = core.runner.follows
    core.runner.follows = lambda *args: followed.append(follows(*args)) or followed[-1]
    same(expected, together(core, requests))
    assert {True, False} <= set(followed), "a step that asks is awaited, others are not"
    assert core.stats().drafted_tokens == core.stats().accepted_tokens > 0
    core.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_steps_that_ask_a_head_for_nothing_queue(tmp_path):
    """The next step begins before their ids are on the host; what the head lacks then, it has from copies."""
    layout, base = "specforge", base_folder(tmp_path)
    config = config_of(layout, settings(layout), ids_of(layout))
    head = find_model(write(tmp_path / "head", layout, config, tensors_of(settings(layout))))
    loaded = with_head(load_model(find_model(base), "float32", options=GRAPH), head, "float32", options=GRAPH)
    assert loaded.draft is not None
    runner, lane = runner_of(loaded, longest=64), Lane(0, list(PROMPT), longest=64)
    plan = StepPlan(0, joined=(lane.join(len(runner.capacity.groups)),), work=(lane.work(),))
    pending, following = runner.execute(plan), []
    for number in range(1, 4):
        plan = StepPlan(number, work=(Work(0, len(PROMPT) - 1 + number, 1, sample=True),))
        assert runner.follows(plan, {}), "the step in progress is waited for"
        following.append(runner.execute(plan))
        lane.ids += runner.sample(pending).rows[0].tokens
        pending = following[-1]
    lane.ids += runner.sample(pending).rows[0].tokens
    lane.computed, lane.propose = len(lane.ids) - 1, 3
    step(runner, [lane])
    assert list(lane.draft) == guessed(layout, lane.ids, 3, loaded.draft.taps)


def test_the_memory_of_a_draft_model_is_counted(target, twin):
    one, both = footprint_of(target, **SIZES), footprint_of(twin, **SIZES)
    assert both.weights == 2 * one.weights and both.angles == 2 * one.angles
    runner = runner_of(twin, rows=4)
    assert runner.proposer and isinstance(runner.proposer.forward, GraphDraft)
    assert both.buffers - one.buffers >= runner.proposer.forward.forwards.num_bytes > 0
    sizes = zip(runner.capacity.groups, runner.capacity.num_blocks, strict=True)
    assert sum(t.nbytes for t in runner.cache.tensors) == sum(group.bytes_per_block * n for group, n in sizes)


def test_all_launches_of_a_draft_model_are_recorded(twin):
    runner = runner_of(twin)
    assert runner.proposer and isinstance(runner.proposer.forward, GraphDraft)
    [replays] = runner.proposer.forward.replays
    assert {name for name, _ in replays._all()} == {"rows", "chosen"}
    names = {launch.kernel.__name__ for launch in replays.launches()}
    assert {"expand_kernel", "take_rows_kernel"} <= names


def test_draft_models_that_lack_a_kernel_are_refused(target, tmp_path):
    files = find_model(random_model("lfm2", tmp_path))
    with pytest.raises(
        ConfigError, match=r"draft model: the graph executor .*no Triton kernel for short_conv"
    ) as found:
        load_draft(target, files, "float32", options=GRAPH)
    assert "--executor eager" in str(found.value)
    with pytest.raises(ConfigError, match="it does not quantize"):
        load_draft(target, files, "float32", options=LoadOptions("graph", quantize="q8"))
