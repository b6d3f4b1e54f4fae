"""Classifiers, pairs and results of each token through an engine: the numbers of transformers, and their bits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvasir.errors import InvalidRequest
from kvasir.inputs import Inputs
from kvasir.types import Request, SamplingParams, Task
from tests.engine.cores import CLASSIFIERS, core_of, random_model
from tests.models.oracle import TOLERANCE
from tests.oracle import Answers, plain, same, together

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is the oracle of these tests")


def requests_for(task: Task, pairs: bool, count: int = 8) -> list[Request]:
    """Texts, or pairs of texts, of various lengths. Without padding: transformers looks for the last other token."""
    rng, params = random.Random(3), SamplingParams(seed=0, max_tokens=1)
    found = []
    for i in range(count):
        ids = tuple(rng.randrange(1, 300) for _ in range(rng.choice([2, 3, 31, 32, 33, 64, 120])))
        inputs = Inputs(second=rng.randrange(1, len(ids))) if pairs and i % 3 else Inputs()
        found.append(Request(f"e{i}", ids, params, task, inputs=inputs))
    return found


def vectors(answers: Answers) -> list[np.ndarray]:
    return [np.frombuffer(answer.embedding or b"", np.float32) for answer in answers.values()]


def expected(transformers: Any, folder: str, kind: str, requests: list[Request]) -> list[np.ndarray]:
    cls = getattr(transformers, CLASSIFIERS[kind]["architectures"][0])
    model = cls.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    found = []
    for request in requests:
        ids, second = torch.tensor([request.prompt_ids]), request.inputs.second or len(request.prompt_ids)
        types = {"token_type_ids": (torch.arange(ids.shape[1]) >= second).long()[None]} if "bert-p" in kind else {}
        with torch.no_grad():
            found.append(model(ids, **types).logits[0].numpy().reshape(-1))
    return found


@pytest.fixture(scope="module", params=[(kind, executor) for kind in CLASSIFIERS for executor in ("program", "eager")])
def case(request, tmp_path_factory):
    """(kind, folder, options, requests, their plain answers)"""
    kind, executor = request.param
    folder = random_model(kind, tmp_path_factory.mktemp(kind))
    options = {"executor": executor, "dtype": "float32"}
    core = core_of(folder, **options, threads=1, max_num_seqs=1)
    task = Task.TOKEN_CLASSIFY if "tokens" in kind else Task.CLASSIFY
    assert core.info.tasks == (task,)
    requests = requests_for(task, "pairs" in kind)
    return kind, folder, options, requests, plain(core, requests)


@pytest.mark.few(5)
@pytest.mark.filterwarnings("ignore")
def test_the_logits_are_those_of_transformers(transformers, case):
    kind, folder, _, requests, answers = case
    for found, logits in zip(vectors(answers), expected(transformers, folder, kind, requests), strict=True):
        assert np.abs(found - logits).max() < TOLERANCE * max(1.0, np.abs(logits).max())


@pytest.mark.few(5)
def test_the_bits_are_the_same_in_any_company(case):
    _, folder, options, requests, answers = case
    for threads, order in ((1, requests), (2, requests[::-1])):
        core = core_of(folder, **options, threads=threads, block_size=16)
        same(answers, together(core, order))


def test_the_types_of_a_pair_move_the_logits(tmp_path):
    core = core_of(random_model("bert-pairs", tmp_path), dtype="float32", threads=1)
    ids, params = tuple(range(5, 45)), SamplingParams(seed=0, max_tokens=1)
    requests = [Request(f"p{i}", ids, params, Task.CLASSIFY, inputs=Inputs(second=i)) for i in (0, 1, 20, 39)]
    found = vectors(together(core, requests))
    assert len({vector.tobytes() for vector in found}) == len(found)


@pytest.mark.parametrize("second", [-1, 40, 50])
def test_a_second_text_lies_within_the_prompt(tmp_path, second):
    core = core_of(random_model("bert-pairs", tmp_path), threads=1)
    params = SamplingParams(seed=0, max_tokens=1)
    with pytest.raises(InvalidRequest, match="second"):
        core.add(Request("p", tuple(range(5, 45)), params, Task.CLASSIFY, inputs=Inputs(second=second)))
