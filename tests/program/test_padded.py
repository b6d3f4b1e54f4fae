"""benchmarks.padded: a wider and deeper model computes what kvasir-mini computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")

from benchmarks.padded import Padded, Sizes, padded, read, write_folder, write_gguf
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.quant.gguf_types import GGMLType
from kvasir.runner.load import LoadOptions, load_model
from kvasir.types import Request, SamplingParams, each_delta
from kvasir.weights.local import find_local
from recipes.mini.draft import folders
from recipes.mini.draft.heads import Mtp
from recipes.mini.generate import load
from tests.models.test_mtp import draft
from tests.program.mini import FOLDER, ids_of, write_mini
from tests.quant.kquants import quantize

WIDER = Sizes(hidden=512, inner=1024, layers=5, kv_heads=4)


def answer(model: Path) -> list[int]:
    core, found = build_core(EngineOptions(str(model), speculate="off", num_blocks=8)), []
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    core.add(Request("r", tuple(ids_of()), params))
    while core.has_work():
        for delta in each_delta(core.advance()):
            found += delta.token_ids
    core.close()
    return found


def test_a_padded_model_answers_with_the_same_tokens(tmp_path):
    own = write_mini(tmp_path / "own.gguf", "Q8_0", tokens=True)
    wide = write_gguf(FOLDER, WIDER, tmp_path / "wide.gguf", "Q8_0")
    assert wide.stat().st_size > 3 * own.stat().st_size
    assert answer(wide) == answer(own)
    assert answer(write_folder(FOLDER, WIDER, tmp_path / "wide")) == answer(FOLDER)


@pytest.mark.parametrize("kind", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0])
def test_blocks_are_those_of_the_model_or_zeros_where_it_writes(kind):
    values = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    own = quantize(values, kind.name)
    for rest in ("zero", "random"):
        rows = Padded("o", (6, 768), ((0, 0, values),), rest).blocks(kind)
        assert rows.shape == (6, 3 * own.shape[1]) and (rows[:4, : own.shape[1]] == own).all()
        others = np.concatenate([rows[:4, own.shape[1] :].ravel(), rows[4:].ravel()])
        assert others.any() == (rest == "random")


@pytest.mark.filterwarnings("ignore")
def test_a_padded_layer_for_multi_token_prediction_drafts_the_same(tmp_path):
    target = load(FOLDER).mini
    folders.write(Mtp(target).init(5), tmp_path / "own", FOLDER)
    write_gguf(tmp_path / "own", WIDER, tmp_path / "wide.gguf", "BF16")
    ids, found = torch.tensor(ids_of()[:40]), []
    for path in (tmp_path / "own", tmp_path / "wide.gguf"):
        loaded = load_model(find_local(path), "float32", options=LoadOptions(mtp=True))
        assert loaded.mtp is not None
        found.append(draft(loaded.model, loaded.mtp, ids))
    assert (found[0] - found[1]).abs().max() < 0.01 * found[0].abs().max()  # its norms stay in float32 in a GGUF file


def test_an_eagle3_head_joins_the_same_rows():
    random, config = np.random.default_rng(5), read(FOLDER)[0]
    fc, rows = random.standard_normal((256, 768)), random.standard_normal((3, 256))
    [wide] = padded({"fc.weight": fc.astype(np.float32)}, config, Sizes(512, 1024, 1, 4))
    found = wide.dense() @ np.pad(rows, ((0, 0), (0, 256))).ravel()
    assert np.allclose(found[:256], fc @ rows.ravel(), rtol=1e-4, atol=1e-4) and not found[256:].any()


def test_sizes_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(ValueError, match="layers is 3: the model has 4"):
        write_gguf(FOLDER, Sizes(512, 1024, 3, 4), tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(ValueError, match="inner: rows of 1000 are not whole blocks of 256"):
        write_gguf(FOLDER, Sizes(512, 1000, 5, 4), tmp_path / "m.gguf", "Q4_K_M")
