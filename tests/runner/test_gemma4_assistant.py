"""A runner that drafts with an assistant of Gemma 4, which reads the target's cache: it proposes what transformers'
assistant would, and answers do not depend on it."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir.ops import native
from kvasir.plan import SamplingSpec
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.runner.load_head import with_head
from kvasir.weights.find import find_model
from tests.models.oracle import random_ids
from tests.models.test_gemma4_assistant import LENGTH, both, expected, made
from tests.runner.proposing import Lane, generate, runner_of, step

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=native.reason()),
    pytest.mark.filterwarnings("ignore"),
]
PROMPT = random_ids(LENGTH, 96, seed=8)
PROGRAM = LoadOptions("program", block_size=16)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[LoadedModel, LoadedModel]:
    """The model without an assistant and with one."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")
    target, head = both(transformers, tmp_path_factory.mktemp("gemma4"))
    alone = load_model(find_model(target), "float32", options=PROGRAM)
    return alone, with_head(alone, find_model(head), "float32", options=PROGRAM)


def test_it_proposes_what_transformers_would(models):
    """After a prompt in chunks, and again after steps that have refused proposals or taken them."""
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")
    target, assistant, _ = made(transformers, "gemma4")
    runner, lane = runner_of(models[1]), Lane(0, list(PROMPT), propose=3, chunk=17)
    while not lane.answer:
        step(runner, [lane])
    for _ in range(4):
        theirs = [int(logits.argmax()) for logits, _ in expected(target, assistant, lane.ids, 3)]
        assert list(lane.draft) == theirs
        step(runner, [lane])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_the_assistant(models, temperature):
    found = []
    for loaded in models:
        options = {"temperature": temperature, "repetition_penalty": 1.2, "top_p": 0.95}
        lanes = [Lane(i, PROMPT[i:], SamplingSpec(seed=i, **options), 2 * i, (9, 40)[i % 2]) for i in range(3)]
        for lane in lanes:
            lane.propose *= loaded.draft is not None
        generate(runner_of(loaded), lanes, 24)
        found.append([lane.answer[:24] for lane in lanes])
    assert found[0] == found[1]
    assert [lane.drafted > 0 for lane in lanes] == [False, True, True]


def test_the_eager_executor_proposes_the_same(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")
    target, assistant, _ = made(transformers, "gemma4")
    base, head = both(transformers, tmp_path)
    loaded = with_head(load_model(find_model(base), "float32"), find_model(head), "float32")
    runner, lane = runner_of(loaded), Lane(0, list(PROMPT), propose=3)
    for _ in range(3):
        step(runner, [lane])
        assert list(lane.draft) == [int(logits.argmax()) for logits, _ in expected(target, assistant, lane.ids, 3)]


def test_it_writes_nothing_into_the_cache(models):
    """The cache has the layers of the target alone, and the bytes of a step stay as they are while it drafts."""
    alone, loaded = (runner_of(model) for model in models)
    caches = []
    for runner, propose in ((alone, 0), (loaded, 4)):
        lane = Lane(0, list(PROMPT), propose=propose)
        step(runner, [lane])
        caches.append(runner.cache.tensors)
    for ours, theirs in zip(*caches, strict=True):
        assert ours.shape == theirs.shape
        assert np.array_equal(ours.view(np.uint8), theirs.view(np.uint8))
