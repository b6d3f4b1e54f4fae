"""A runner that drafts with a model's own head for multi-token prediction."""

from __future__ import annotations

import pytest

from kvasir.ops import native
from kvasir.plan import SamplingSpec
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.load_draft import with_own_draft
from kvasir.runner.proposals import LAG
from kvasir.weights.find import find_model
from tests.models.mtp_oracle import Oracle
from tests.models.oracle import random_ids
from tests.runner.proposing import BLOCK, Lane, decode, generate, runner_of, step, watched

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=native.reason()),
    pytest.mark.filterwarnings("ignore"),
]
SLOW = ("deepseek-v3", "mimo-v2-flash")


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def loaded(transformers, tmp_path_factory):
    found = {}

    def load(kind: str, executor: str = "program", layers: int = 1):
        if (kind, executor, layers) not in found:
            folder = tmp_path_factory.mktemp(kind)
            Oracle.of(transformers, kind, layers).save(folder)
            options = LoadOptions(executor, block_size=16, mtp=True)
            found[kind, executor, layers] = load_model(find_model(folder), "float32", options=options)
        return found[kind, executor, layers]

    return load


@pytest.mark.parametrize(
    ("kind", "executor"),
    [("llama", "program"), ("llama", "eager"), ("qwen3-5", "program")]
    + [pytest.param("qwen3-5", "eager", marks=pytest.mark.slow)]
    + [pytest.param(k, e, marks=pytest.mark.slow) for k in SLOW for e in ("program", "eager")],
)
def test_a_head_proposes_what_it_predicts(transformers, loaded, kind, executor):
    """After a prompt in chunks, then after each step: rejected guesses leave no trace."""
    oracle, runner = Oracle.of(transformers, kind), runner_of(with_own_draft(loaded(kind, executor)))
    lane = Lane(0, random_ids(45, 96), propose=3, chunk=20)
    for _ in range(12):
        step(runner, [lane])
        if lane.answer:
            assert list(lane.draft) == oracle.guesses(lane.ids, 3)
    assert lane.drafted > lane.accepted, "no guess was wrong"


@pytest.mark.parametrize(
    ("kind", "executor"),
    [
        ("llama", "program"),
        ("llama", "eager"),
        ("mimo-v2-flash", "program"),
        ("step3p5", "program"),
        ("step3p5", "eager"),
    ]
    + [pytest.param("mimo-v2-flash", "eager", marks=pytest.mark.slow)]
    + [pytest.param(k, e, marks=pytest.mark.slow) for k in ("deepseek-v3", "qwen3-5") for e in ("program", "eager")],
)
def test_each_layer_of_a_head_proposes_an_id(transformers, loaded, kind, executor):
    """Three layers, which lack the last ids of what they have computed; the last one draws the ids beyond three."""
    oracle = Oracle.of(transformers, kind, 3)
    runner = runner_of(with_own_draft(loaded(kind, executor, 3)))
    lane = Lane(0, random_ids(45, 96), propose=5, chunk=20)
    other = Lane(1, random_ids(30, 96), propose=2, chunk=29)
    for wanted in (5, 5, 1, 3, 4, 5, 2, 5, 5, 5):
        step(runner, [lane, other])
        if lane.answer:
            assert list(lane.draft) == oracle.guesses(lane.ids, lane.propose)
            assert list(other.draft) == oracle.guesses(other.ids, other.propose)
        lane.propose = wanted
    assert lane.drafted > lane.accepted, "no guess was wrong"


def answer(runner, ids: list[int], count: int) -> list[int]:
    lane = Lane(0, list(ids))
    generate(runner, [lane], count)
    return lane.answer[:count]


def test_hidden_rows_wait_until_they_are_asked_for(transformers, loaded, monkeypatch):
    """Columns ask for nothing; what they leave is computed together, from time to time."""
    oracle, runner = Oracle.of(transformers, "llama"), runner_of(with_own_draft(loaded("llama")))
    lanes = [Lane(0, random_ids(20, 96), propose=2), Lane(1, random_ids(30, 96))]
    seen = watched(runner, monkeypatch)
    step(runner, lanes)
    assert seen == [[20, 30], [1]]
    for _ in range(LAG + 3):
        decode(runner, lanes)
    assert seen[2:] == [[LAG + 1, LAG + 1]]
    for row, lane in enumerate(lanes):
        lane.propose = 3
        step(runner, [lane])
        assert seen[-3:] == [[3], [1], [1]], "two that waited"
        assert list(lane.draft) == oracle.guesses(lane.ids, 3), row


def test_several_layers_wait_together(transformers, loaded, monkeypatch):
    """The last positions are computed again, since their last layers had read guesses, or nothing yet."""
    oracle, runner = Oracle.of(transformers, "llama", 3), runner_of(with_own_draft(loaded("llama", layers=3)))
    lanes = [Lane(0, random_ids(20, 96), propose=2), Lane(1, random_ids(30, 96))]
    seen = watched(runner, monkeypatch)
    step(runner, lanes)
    assert seen == [[20, 30]] * 3
    for _ in range(LAG - 1):
        decode(runner, lanes)
    assert seen[3:] == [[LAG + 1, LAG + 1]] * 3
    for row, lane in enumerate(lanes):
        lane.propose = 4
        step(runner, [lane])
        assert seen[-4:] == [[3]] * 3 + [[1]], "two of them again"
        assert list(lane.draft) == oracle.guesses(lane.ids, 4), row


def test_a_head_goes_on_after_a_prefix_and_a_preemption(transformers, loaded):
    """Of a shared prefix, only the last row was computed with another next id."""
    oracle, runner = Oracle.of(transformers, "llama"), runner_of(with_own_draft(loaded("llama")))
    first = Lane(0, random_ids(40, 96), propose=3)
    generate(runner, [first], 10)
    again = Lane(1, list(first.ids), propose=3, computed=3 * BLOCK, blocks=(*first.blocks[:3], *range(20, 30)))
    step(runner, [again])
    assert list(again.draft) == oracle.guesses(again.ids, 3)


def test_garbage_in_a_heads_cache_costs_drafts_only(loaded, monkeypatch):
    model = with_own_draft(loaded("llama"))
    ids = random_ids(40, 96)
    truth = answer(runner_of(model), ids, 20)
    runner = runner_of(model)
    runner.cache.fill_(float("nan"))
    first = Lane(0, list(ids), propose=2)
    with monkeypatch.context() as without:  # the target alone fills the blocks
        without.setattr(runner.proposer, "propose", lambda *args: {})
        generate(runner, [first], 2)
    second = Lane(1, list(ids), propose=2, computed=2 * BLOCK, blocks=(*first.blocks[:2], *range(20, 30)))
    generate(runner, [second], 20)
    assert second.answer[:20] == truth and second.drafted == 0


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("llama", 1), ("llama", 3), ("qwen3-5", 1), ("step3p5", 3)]
    + [pytest.param(k, 2, marks=pytest.mark.slow) for k in SLOW],
)
def test_answers_do_not_depend_on_a_head(loaded, kind, layers):
    model, ids = loaded(kind, layers=layers), random_ids(40, 96)
    specs = [SamplingSpec(), SamplingSpec(temperature=0.9, seed=3, mirostat=2), SamplingSpec(temperature=1.0, seed=1)]
    found = []
    for asked, one in (((0, 0, 0), model), ((3, 1, 5), with_own_draft(model))):
        lanes = [Lane(i, ids[i:], spec, asked[i]) for i, spec in enumerate(specs)]
        generate(runner_of(one, tokens=200), lanes, 30)
        found.append([lane.answer[:30] for lane in lanes])
    assert found[0] == found[1] and all(lane.drafted for lane in lanes)
