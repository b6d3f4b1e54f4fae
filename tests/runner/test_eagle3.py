"""A runner that drafts with an EAGLE-3 head: it proposes what the head in plain torch would, and answers do not depend
on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvasir.ops import native
from kvasir.plan import SamplingSpec
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.runner.load_head import with_head
from kvasir.weights.find import find_model
from tests.layers.parts import batch_of
from tests.models import eagle3_heads as plain
from tests.models.driver import make_cache, piece
from tests.models.oracle import random_ids
from tests.models.test_eagle3 import base_program, config_of, fast, ids_of, settings, target, tensors_of
from tests.runner.proposing import Lane, generate, runner_of, step

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())
PROMPT = random_ids(40, 96, seed=8)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> LoadedModel:
    return base_program(tmp_path_factory.mktemp("target"))


def drafting(base: LoadedModel, folder: Path, layout: str, dtype: str = "float32", **options) -> LoadedModel:
    s = settings(layout)
    files = find_model(plain.write(folder / "head", layout, config_of(layout, s, ids_of(layout)), tensors_of(s)))
    return with_head(base, files, dtype, options=LoadOptions("program", **options))


class Rows:
    """Keeps the rows after each layer."""

    def __init__(self, batch):
        self.batch, self.found = batch, {}

    def after_layer(self, layer: int, rows: Tensor) -> None:
        self.found[f"layers.{layer}"] = rows

    def __getattr__(self, name):
        return getattr(self.batch, name)


@torch.inference_mode()
def guessed(layout: str, ids: list[int], count: int, taps: tuple[str, ...]) -> list[int]:
    """The ids that the head in plain torch drafts after `ids`, of which the target has computed all but the last."""
    s = settings(layout)
    tensors, cache = tensors_of(s), make_cache(target())
    seen = Rows(batch_of([piece(cache, ids[:-1], 0, np.arange(1, 9, dtype=np.int32))], cache))
    target().forward(seen.tokens_T, seen)
    table = tensors["embed_tokens.weight"] if s["embed"] else target().embed.weight
    lm_head = tensors["lm_head.weight"] if s["head"] else target().head.weight.squeeze(0)
    to_target = tensors["d2t"] + torch.arange(s["draft"]) if "d2t" in tensors else torch.arange(s["draft"])
    rows = plain.fused(s, tensors, torch.cat([seen.found[tap][: len(ids) - 1] for tap in taps], 1))
    ids = list(ids)
    for _ in range(count):
        _, logits, carried = plain.head(s, tensors, rows, table[ids[1:]], lm_head)
        ids.append(int(to_target[logits[-1].argmax()]))
        rows = torch.cat([rows, carried[-1:]])
    return ids[-count:]


@pytest.mark.parametrize(
    "layout", fast(("specforge", "eagle-3.1", "speculators-qwen3", "shared-head", "vllm"), "specforge", "eagle-3.1")
)
def test_it_proposes_what_the_head_in_plain_torch_would(base, tmp_path, layout):
    """After a prompt in chunks, and again after a step that has refused its first proposals."""
    loaded = drafting(base, tmp_path, layout)
    assert loaded.draft is not None
    runner, lane = runner_of(loaded), Lane(0, list(PROMPT), propose=4, chunk=17)
    while not lane.answer:
        step(runner, [lane])
    for _ in range(3):
        assert list(lane.draft) == guessed(layout, lane.ids, 4, loaded.draft.taps)
        step(runner, [lane])


@pytest.mark.parametrize(("layout", "temperature"), [("specforge", 0.0), ("gguf", 0.8), ("shared-head", 0.8)])
def test_answers_do_not_depend_on_the_head(base, tmp_path, layout, temperature):
    found = []
    for loaded in (base, drafting(base, tmp_path, layout, dtype="bfloat16", quantize="q8")):
        options = {"temperature": temperature, "repetition_penalty": 1.2, "top_p": 0.95}
        lanes = [Lane(i, PROMPT[i:], SamplingSpec(seed=i, **options), 2 * i, (9, 40)[i % 2]) for i in range(3)]
        for lane in lanes:
            lane.propose *= loaded.draft is not None
        generate(runner_of(loaded), lanes, 24)
        found.append([lane.answer[:24] for lane in lanes])
    assert found[0] == found[1]
    assert [lane.drafted > 0 for lane in lanes] == [False, True, True]


def test_a_loaded_head_is_counted(base, tmp_path):
    loaded = drafting(base, tmp_path, "specforge", dtype="bfloat16", quantize="q8")
    assert loaded.held > base.held and loaded.bytes > base.bytes
    assert "Q8_0" in loaded.formats and "Q8_0" not in base.formats


def test_the_eager_executor_proposes_the_same(tmp_path):
    base_program(tmp_path)
    eager = load_model(find_model(tmp_path), "float32")
    loaded = drafting(eager, tmp_path, "specforge")
    assert eager.executor == "eager" and loaded.draft is not None
    lane = Lane(0, list(PROMPT), propose=4, chunk=17)
    runner = runner_of(loaded)
    for _ in range(4):
        step(runner, [lane])
    assert list(lane.draft) == guessed("specforge", lane.ids, 4, loaded.draft.taps)
