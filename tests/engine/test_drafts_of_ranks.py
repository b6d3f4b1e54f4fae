"""Heads that use the model's tables draft on rank 0, also of stages of ranks: answers are those of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvasir.ops import native
from tests.engine.cores import core_of
from tests.engine.test_rank_processes import asked, children
from tests.engine.test_stage_processes import staged_core
from tests.oracle import plain, same, together

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not native.available(), reason=native.reason()),
    pytest.mark.filterwarnings("ignore"),
]
SIZES = [(2, 1), (4, 1), (8, 1), (2, 2)]
ALL = [pytest.param(*size, marks=pytest.mark.slow if size != (2, 1) else ()) for size in SIZES]


def check(folder: Path | str, size: int, stages: int, speculate: str, **options: Any) -> tuple[int, int]:
    """Compares the answers with those of one process without drafts; returns how many ids were drafted and accepted."""
    core = core_of(str(folder), executor="program", threads=1, **options)
    expected, parameters = plain(core, asked(3)), core.info.num_parameters
    core.close()
    core = staged_core(str(folder), size, stages, speculate=speculate, num_blocks=60, block_size=16, **options)
    same(expected, together(core, asked(3), seed=size, preempt=0.3))
    stats = core.stats()
    assert stats.preemptions > 0 and core.info.num_parameters >= parameters
    core.close()
    assert not children()
    return stats.drafted_tokens, stats.accepted_tokens


def mtp(folder: Path, certain: bool) -> Path:
    """A model with layers of its own for multi-token prediction. certain: whether they are right, since in both the
    layers add nothing."""
    from tests.models.mtp_oracle import Oracle

    oracle = Oracle.of(pytest.importorskip("transformers"), "llama", 1)
    oracle.save(folder)
    if certain:
        state, width = dict(oracle.state), oracle.target.config.hidden_size
        for name, tensor in state.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                state[name] = torch.zeros_like(tensor)
            elif name.endswith("eh_proj.weight"):
                state[name] = torch.eye(width, 2 * width)
            elif name.endswith("enorm.weight"):
                state[name] = torch.ones_like(tensor)
        _save(state, folder)
    return folder


def _save(state: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(("size", "stages"), ALL)
def test_right_guesses_of_the_models_own_layers_are_accepted(tmp_path, size, stages):
    drafted, accepted = check(mtp(tmp_path, True), size, stages, "mtp", dtype="float32")
    assert 0 < drafted < 3 * accepted


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), SIZES)
def test_wrong_guesses_of_the_models_own_layers_are_not(tmp_path, size, stages):
    drafted, accepted = check(mtp(tmp_path, False), size, stages, "mtp", dtype="bfloat16")
    assert accepted < drafted


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantize", ["q8", None])
def test_tables_that_are_tied_or_quantized_are_whole_on_rank_0(tmp_path, tied, quantize):
    folder = mtp(tmp_path, True)
    if tied:
        from safetensors.torch import load_file

        state, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        del state["lm_head.weight"]
        _save(state, folder)
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    _, accepted = check(folder, 2, 1, "mtp", quantize=quantize, dtype="bfloat16")
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), SIZES)
@pytest.mark.parametrize("kind", ["shared-head", "specforge", "dflash"])
def test_a_head_that_uses_tables_of_the_model_drafts(tmp_path, kind, size, stages):
    from tests.models import dflash_heads, eagle3_heads
    from tests.models.test_eagle3 import base_folder, ids_of

    folder = base_folder(tmp_path)
    if kind == "dflash":
        s = dflash_heads.settings("both ways")
        head = dflash_heads.write(tmp_path / "head", dflash_heads.config_of(s), dflash_heads.tensors_of(s))
    else:
        s, config = eagle3_heads.settings(kind), eagle3_heads.config_of
        tensors = eagle3_heads.tensors_of(s)
        head = eagle3_heads.write(tmp_path / "head", kind, config(kind, s, ids_of(kind)), tensors)
    option = "dflash" if kind == "dflash" else "eagle3"
    drafted, _ = check(folder, size, stages, f"{option}={head}", dtype="float32")
    assert drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), [(2, 1), (2, 2)])
def test_an_assistant_that_reads_the_models_keys_drafts(tmp_path, size, stages):
    """The attention of these models is whole on every rank."""
    from tests.models.test_gemma4_assistant import both

    target, head = both(pytest.importorskip("transformers"), tmp_path)
    drafted, _ = check(target, size, stages, f"draft={head}", dtype="float32")
    assert drafted > 0
