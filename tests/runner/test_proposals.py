"""A runner that drafts with a second model: what it proposes, and that answers do not depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.ops import native
from kvasir.plan import SamplingSpec
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.load_draft import load_draft
from kvasir.weights.find import find_model
from tests.engine.cores import random_model
from tests.runner.proposing import Lane, generate, runner_of, shortened

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())
PROMPT = [(7 * i + 3) % 290 for i in range(40)]
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
