"""Models and heads that draft on a GPU: a model is always right about itself, and no drafter changes an answer."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the extra gpu is not installed")

from tests.gpu.places import DEVICE, DRY, MARKS  # noqa: E402

pytestmark = [*MARKS, pytest.mark.timeout(1800)]
TOKENS = 4 if DRY else 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint of a small model."""
    for package in ("safetensors", "ml_dtypes"):
        pytest.importorskip(package, reason=f"{package}, which writes the model's files, is not installed")
    from tests.models.test_eagle3 import base_folder

    return base_folder(tmp_path_factory.mktemp("llama"))


def core_of(folder, **options) -> Any:
    from tests.graph.models import graph_core

    return graph_core(str(folder), device=DEVICE, **{"dtype": "bfloat16", "num_blocks": 80, **options})


@pytest.fixture(scope="module")
def answers(folder):
    """Requests that are sampled on the device and on the host, and their answers without speculation."""
    from tests.oracle import plain
    from tests.runner.made import request

    kinds = [{}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 0.8, "repetition_penalty": 1.2, "mirostat": 2}]
    kinds = kinds[1:2] if DRY else kinds
    requests = [request(str(i), range(5 + i, 25), seed=i, max_tokens=TOKENS, **kind) for i, kind in enumerate(kinds)]
    return requests, plain(core_of(folder, speculate="off"), requests)


def drafted(core: Any, requests: Any, expected: Any) -> tuple[int, int]:
    """Drafted and accepted tokens of a core that always drafts."""
    from tests.oracle import same, together

    core.scheduler.drafter.pays = lambda rows, predicted: True
    same(expected, together(core, requests))
    stats = core.stats()
    core.close()
    return stats.drafted_tokens, stats.accepted_tokens


@pytest.mark.parametrize("overlap", [True] if DRY else [False, True])
def test_a_model_that_drafts_for_itself(folder, answers, overlap):
    """Its logits have the bits of the model's own, in buckets and chunks of another size."""
    tokens, accepted = drafted(core_of(folder, speculate=f"draft={folder}", overlap=overlap), *answers)
    assert tokens == accepted > 0


@pytest.mark.parametrize("layout", ["specforge"] if DRY else ["specforge", "eagle-3.1", "shared-head"])
def test_an_eagle3_head(folder, answers, layout, tmp_path):
    from tests.models.eagle3_heads import config_of, settings, tensors_of, write
    from tests.models.test_eagle3 import ids_of

    s = settings(layout)
    head = write(tmp_path / "head", layout, config_of(layout, s, ids_of(layout)), tensors_of(s))
    tokens, accepted = drafted(core_of(folder, speculate=f"eagle3={head}"), *answers)
    assert tokens > accepted


BLOCKS = ["qwen3", "sliding", "mixed", "dspark", "dspark gated", "dspark rnn"]


@pytest.mark.parametrize("variant", ["dspark rnn"] if DRY else BLOCKS)
def test_a_drafter_of_blocks(folder, answers, variant, tmp_path):
    from tests.models.dflash_heads import config_of, settings, tensors_of, write

    s = settings(variant)
    head = write(tmp_path / "head", config_of(s, variant), tensors_of(s))
    tokens, accepted = drafted(core_of(folder, speculate=f"dflash={head}"), *answers)
    assert tokens > accepted


@pytest.mark.skipif(DRY, reason="tests/graph/test_drafting.py does this in the interpreter")
@pytest.mark.parametrize("variant", BLOCKS)
def test_a_drafter_of_blocks_proposes_what_it_would_in_plain_torch(folder, variant, tmp_path):
    """In float32 on the device, from the target's rows as its recorded launches leave them."""
    from kvasir.runner.load import LoadOptions, load_model
    from kvasir.weights.find import find_model
    from tests.runner.proposing import BLOCK, Lane, runner_of, step
    from tests.runner.test_dflash import PROMPT, drafting, guessed

    target = load_model(find_model(folder), "float32", DEVICE, options=LoadOptions("graph", block_size=BLOCK))
    loaded = drafting(target, tmp_path, variant, device=DEVICE)
    runner, lane = runner_of(loaded, device=DEVICE), Lane(0, list(PROMPT), propose=7, chunk=17)
    while not lane.answer:
        step(runner, [lane])
    for _ in range(4):
        assert loaded.draft and list(lane.draft) == guessed(variant, lane.ids, 7, loaded.draft.taps)
        step(runner, [lane])


@pytest.mark.skipif(DRY, reason="tests/graph/test_drafting.py does this in the interpreter")
def test_layers_for_multi_token_prediction(tmp_path):
    from tests.models.mtp_oracle import Oracle
    from tests.oracle import plain
    from tests.runner.made import request

    Oracle.of(pytest.importorskip("transformers"), "llama", 2).save(tmp_path)
    requests = [request(str(i), range(5 + i, 25), seed=i, max_tokens=TOKENS, temperature=0.4 * i) for i in range(3)]
    expected = plain(core_of(tmp_path, speculate="off"), requests)
    tokens, accepted = drafted(core_of(tmp_path, speculate="mtp"), requests, expected)
    assert tokens > accepted


@pytest.mark.skipif(DRY, reason="tests/graph/test_drafting.py does this in the interpreter")
def test_an_assistant_of_gemma_4(tmp_path):
    """It reads the cache of its target, whose layers share keys and values."""
    from tests.models.test_gemma4_assistant import dummies
    from tests.oracle import plain
    from tests.runner.made import request

    base, head = dummies(tmp_path)
    requests = [request(str(i), range(5 + i, 45), seed=i, max_tokens=TOKENS, temperature=0.4 * i) for i in range(3)]
    expected = plain(core_of(base, speculate="off"), requests)
    for overlap in (False, True):
        core = core_of(base, speculate=f"draft={head}", overlap=overlap)
        tokens, accepted = drafted(core, requests, expected)
        assert tokens > accepted


@pytest.mark.skipif(DRY, reason="tests/graph/test_drafting.py does this in the interpreter")
def test_steps_that_ask_a_head_for_nothing_queue(folder, answers, tmp_path):
    """Neither they nor the steps that ask change an answer."""
    from itertools import count

    from tests.models.eagle3_heads import config_of, settings, tensors_of, write
    from tests.models.test_eagle3 import ids_of
    from tests.oracle import same, together

    s = settings("specforge")
    head = write(tmp_path / "head", "specforge", config_of("specforge", s, ids_of("specforge")), tensors_of(s))
    core, requests, expected = core_of(folder, speculate=f"eagle3={head}", overlap=True), *answers
    looks, followed, follows = count(), [], core.runner.follows
    core.scheduler.drafter.pays = lambda rows: next(looks) % 12 < 4
    core.runner.follows = lambda *args: followed.append(follows(*args)) or followed[-1]
    same(expected, together(core, requests))
    assert {True, False} <= set(followed) and core.stats().drafted_tokens > 0
    core.close()
