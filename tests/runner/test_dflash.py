"""A runner that drafts with DFlash: it proposes what the drafter in plain torch would, and answers do not depend on
it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir.ops import native
from kvasir.plan import SamplingSpec
from kvasir.runner.block_proposals import LEAST
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.runner.load_head import with_head
from kvasir.weights.find import find_model
from tests.layers.parts import batch_of
from tests.models import dflash_heads as plain
from tests.models.dflash_heads import config_of, settings, tensors_of
from tests.models.driver import make_cache, piece
from tests.models.oracle import random_ids
from tests.models.test_eagle3 import base_folder, base_program, target
from tests.runner.proposing import Lane, generate, runner_of, step, watched
from tests.runner.test_eagle3 import Rows

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())
PROMPT = random_ids(40, 96, seed=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> LoadedModel:
    return base_program(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def eager(tmp_path_factory) -> LoadedModel:
    return load_model(find_model(base_folder(tmp_path_factory.mktemp("eager"))), "float32")


def drafting(
    base: LoadedModel, folder: Path, variant: str, dtype: str = "float32", device: str = "cpu", **options
) -> LoadedModel:
    s = settings(variant)
    files = find_model(plain.write(folder / "head", config_of(s, variant), tensors_of(s)))
    return with_head(base, files, dtype, device, options=LoadOptions(base.executor, **options))


@torch.inference_mode()
def guessed(variant: str, ids: list[int], count: int, taps: tuple[str, ...]) -> list[int]:
    """The ids that the drafter in plain torch guesses after `ids`, of which the target has computed all but the
    last."""
    s = settings(variant)
    tensors, cache = tensors_of(s), make_cache(target())
    seen = Rows(batch_of([piece(cache, ids[:-1], 0, np.arange(1, 9, dtype=np.int32))], cache))
    target().forward(seen.tokens_T, seen)
    table = tensors["embed_tokens.weight"] if s["embed"] else target().embed.weight
    lm_head = tensors["lm_head.weight"] if s["head"] else target().head.weight.squeeze(0)
    rows = torch.cat([seen.found[tap][: len(ids) - 1] for tap in taps], 1)
    block = [ids[-1], *(s["mask"],) * (count - s["anchored"])]
    hidden = plain.hidden_rows(s, tensors, rows, table[block])[not s["anchored"] :]
    logits = plain.logits_of(s, hidden, lm_head)
    own = plain.target_ids(tensors)
    own = torch.arange(s["vocab"]) if own is None else own
    if not s["markov"]:
        return own[logits.argmax(-1)].tolist()
    found: list[int] = []
    for i in range(count):
        added, sure = plain.corrections(s, tensors, hidden[: i + 1], [ids[-1], *found])
        if found and sure.prod() < LEAST:
            break
        found.append(int(own[(logits[i] + added[-1]).argmax()]))
    return found


@pytest.mark.few(6)
@pytest.mark.parametrize("variant", plain.VARIANTS)
@pytest.mark.parametrize("executor", ["program", "eager"])
def test_it_proposes_what_plain_torch_would(base, eager, tmp_path, executor, variant):
    """After a prompt in chunks, and again after steps that have refused its first proposals."""
    loaded = drafting(base if executor == "program" else eager, tmp_path, variant)
    assert loaded.draft is not None and loaded.executor == executor
    runner, lane = runner_of(loaded), Lane(0, list(PROMPT), propose=4, chunk=17)
    while not lane.answer:
        step(runner, [lane])
    for _ in range(3):
        assert list(lane.draft) == guessed(variant, lane.ids, 4, loaded.draft.taps)
        step(runner, [lane])


def test_a_block_is_one_pass(base, tmp_path, monkeypatch):
    """Of two rows together, at most as long as it was trained."""
    loaded = drafting(base, tmp_path, "qwen3")
    runner = runner_of(loaded, tokens=96)
    lanes = [Lane(0, list(PROMPT), propose=16), Lane(1, PROMPT[3:], propose=2)]
    seen = watched(runner, monkeypatch)
    step(runner, lanes)
    assert loaded.draft is not None and [len(lane.draft) for lane in lanes] == [7, 2]
    assert seen == [[40, 37], [8, 3]]
    for lane, count in zip(lanes, (7, 2), strict=True):
        assert list(lane.draft) == guessed("qwen3", lane.ids, count, loaded.draft.taps)


def test_blocks_that_do_not_fit_into_a_step_are_computed_one_after_another(base, tmp_path, monkeypatch):
    loaded = drafting(base, tmp_path, "qwen3")
    assert loaded.draft is not None
    runner = runner_of(loaded, tokens=16, rows=3)
    lanes = [Lane(i, PROMPT[: 3 + i], propose=7) for i in range(3)]
    seen = watched(runner, monkeypatch)
    step(runner, lanes)
    assert seen == [[3, 4, 5], [8, 8], [8]]
    for lane in lanes:
        assert list(lane.draft) == guessed("qwen3", lane.ids, 7, loaded.draft.taps)


@pytest.mark.parametrize("executor", ["program", "eager"])
def test_a_draft_ends_where_it_is_probably_wrong(base, eager, tmp_path, executor):
    """The first id is checked in any case."""
    s = settings("dspark rnn")
    for bias, count in ((-9.0, 1), (9.0, 8)):
        tensors = tensors_of(s)
        tensors["confidence_head.proj.bias"][:] = bias
        tensors["confidence_head.proj.weight"] *= 0.1
        folder = plain.write(tmp_path / f"{count}", config_of(s, "dspark rnn"), tensors)
        target = base if executor == "program" else eager
        loaded = with_head(target, find_model(folder), "float32", options=LoadOptions(executor))
        lanes = [Lane(i, PROMPT[i:], propose=16) for i in range(2)]
        step(runner_of(loaded, tokens=96), lanes)
        assert [len(lane.draft) for lane in lanes] == [count] * 2


@pytest.mark.parametrize(
    ("variant", "temperature"), [("qwen3", 0.0), ("sliding", 0.8), ("dspark rnn", 0.8), ("speculators", 0.8)]
)
def test_answers_do_not_depend_on_the_drafter(base, tmp_path, variant, temperature):
    found = []
    for loaded in (base, drafting(base, tmp_path, variant, dtype="bfloat16", quantize="q8")):
        options = {"temperature": temperature, "repetition_penalty": 1.2, "top_p": 0.95}
        lanes = [Lane(i, PROMPT[i:], SamplingSpec(seed=i, **options), 2 * i, (9, 40)[i % 2]) for i in range(3)]
        for lane in lanes:
            lane.propose *= loaded.draft is not None
        generate(runner_of(loaded), lanes, 24)
        found.append([lane.answer[:24] for lane in lanes])
    assert found[0] == found[1]
    assert [lane.drafted > 0 for lane in lanes] == [False, True, True]
