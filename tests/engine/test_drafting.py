"""Engines whose drafters have weights: the options name them, and no answer depends on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvasir.errors import UnsupportedModel
from kvasir.guided import sources
from kvasir.ops import native
from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of, random_model
from tests.models import dflash_heads
from tests.models.eagle3_heads import config_of, settings, tensors_of, write
from tests.models.test_eagle3 import base_folder
from tests.models.test_gemma4_assistant import both
from tests.oracle import mixed_requests, plain, poison, same, together
from tests.runner.made import request, small_core
from tests.runner.proposing import renumbered

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_model("llama", tmp_path_factory.mktemp("llama"))


def requests():
    sampled = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 20}
    return [request(str(i), range(5, 30 + i), seed=i, **sampled if i else {}) for i in range(3)]


def draft_of(core) -> Any:
    return core.runner.proposer.draft


@pytest.mark.parametrize(
    "options", [{"overlap": True}, {"kv_dtype": "int8", "quantize": "q8", "dtype": "bfloat16", "threads": 2}]
)
def test_a_draft_model_changes_no_answer(folder, options):
    """The model itself, whose guesses are all right."""
    expected = plain(small_core(folder, "program", speculate="off", **options), requests())
    core = small_core(folder, "program", speculate=f"draft={folder}", **options)
    assert core.runner.capacity.proposes and draft_of(core).target_ids is None
    same(expected, together(core, requests()))
    drafted, accepted = core.stats().drafted_tokens, core.stats().accepted_tokens
    assert drafted == accepted > 0
    core.close()


SCHEMA = {
    "type": "object",
    "properties": {
        "name of the city": {"enum": ["Rome", "Oslo", "Lima"]},
        "degrees": {"type": "integer"},
        "words": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name of the city", "degrees", "words"],
}


def guided(name: str, **params) -> Request:
    fixed = {"seed": 3, "max_tokens": 60}
    prompt = tuple(5 + i % 60 for i in range(40))
    return Request(name, prompt, SamplingParams(**fixed | params), grammar=sources.json_schema(SCHEMA))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("executor", "jump_ahead"),
    [("program", True), ("program", False), pytest.param("eager", True, marks=pytest.mark.slow)],
)
def test_guesses_follow_the_grammar(executor, jump_ahead):
    """The model itself, at each temperature: all its guesses are right."""
    options = {"executor": executor, "threads": 1, "block_size": 16, "jump_ahead": jump_ahead}
    requests = [guided("cold", temperature=0.0), guided("hot", temperature=1.0), guided("free", temperature=2.0)]
    expected = plain(core_of("kvasir-mini", speculate="off", **options), requests)
    core = core_of("kvasir-mini", speculate="draft=kvasir-mini", **options)
    drafter, seen = core.scheduler.drafter, []
    drafter.pays, drafter.asks, take = lambda rows, predicted: True, lambda seq, most: min(most, 4), drafter.proposed

    def proposed(seq, ids, after):
        seen.append((seq, list(ids), after))
        take(seq, ids, after)

    drafter.proposed = proposed
    same(expected, together(core, requests))
    for seq, ids, after in seen:
        assert ids[: len(seq.tokens) - after] == list(seq.tokens[after : after + len(ids)])
    assert sum(len(ids) for _, ids, _ in seen) > 60
    assert core.stats().drafted_tokens == core.stats().accepted_tokens > 40
    core.close()


def test_a_draft_model_with_another_tokenizer(folder, tmp_path):
    """Its ids are found by the tokens' bytes."""
    import tokenizers

    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).tolist()
    renumbered(Path(folder), tmp_path / "other", torch.tensor(order))
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    for name in ("config.json", "model.safetensors"):
        (own / name).symlink_to(Path(folder) / name)
    texts = [f"{chr(0x4E00 + i)}" for i in range(300)]
    for place, ids in ((own, range(300)), (other, order)):
        backend = tokenizers.Tokenizer(tokenizers.models.BPE({texts[i]: n for n, i in enumerate(ids)}, []))
        backend.decoder = tokenizers.decoders.Fuse()
        backend.save(str(place / "tokenizer.json"))
        (place / "tokenizer_config.json").write_text(json.dumps({}))
    core = small_core(str(own), "program", speculate=f"draft={other}")
    assert draft_of(core).target_ids.tolist() == order
    same(plain(small_core(folder, "program", speculate="off"), requests()), together(core, requests()))
    core.close()


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ({"draft_dtype": "bfloat16"}, {"F32", "BF16"}),
        ({"dtype": "bfloat16", "draft_dtype": "float32", "kv_dtype": "int8"}, {"F32", "BF16"}),
        ({"draft_quantize": "q8"}, {"F32", "Q8_0"}),
        ({"quantize": "q4"}, {"Q4_0", "Q8_0"}),
        ({"quantize": "q4", "draft_quantize": "none"}, {"Q4_0", "Q8_0", "F32"}),
    ],
)
def test_a_draft_model_has_a_dtype_and_a_quantization_of_its_own(folder, options, formats):
    model = {name: value for name, value in options.items() if not name.startswith("draft_")}
    expected = plain(small_core(folder, "program", speculate="off", **model), requests())
    core = small_core(folder, "program", speculate=f"draft={folder}", **options)
    [kernels] = [line for line in core.summary if line.startswith("kernels")]
    assert {word for word in kernels.split() if word[-2:] in ("32", "16", "_0")} == formats
    same(expected, together(core, requests()))
    assert core.stats().drafted_tokens > 0
    core.close()


@pytest.mark.slow
def test_the_eager_executor_computes_a_draft_model_of_another_dtype(folder):
    for dtype, draft_dtype in (("float32", "bfloat16"), ("bfloat16", "float32")):
        expected = plain(small_core(folder, "eager", speculate="off", dtype=dtype), requests())
        core = small_core(folder, "eager", speculate=f"draft={folder}", dtype=dtype, draft_dtype=draft_dtype)
        same(expected, together(core, requests()))
        core.close()


@pytest.mark.parametrize(("length", "last"), [(None, 53), (40, 40), (26, 26), (25, 0)])
def test_a_draft_model_guesses_up_to_a_length(folder, length, last):
    """Longer sequences are planned as without it, and their prompts cost it nothing."""
    core = small_core(folder, "program", speculate=f"draft={folder}", draft_max_model_len=length)
    drafter, forward = core.scheduler.drafter, core.runner.proposer.forward
    drafter.pays, drafter.asks = lambda rows, predicted: True, lambda seq, most: most
    reached, plans = [0], []
    run = forward.run
    forward.run = lambda spans, *rows: reached.extend(span.end for span in spans) or run(spans, *rows)
    core.plan_listener = plans.append
    core.add(request("0", range(5, 30), max_tokens=30))
    while core.has_work():
        core.step()
    assert max(reached) == last
    assert any(work.propose for plan in plans for work in plan.work) == bool(last)
    core.close()


@pytest.mark.parametrize(
    ("speculate", "message"),
    [
        ("mtp", "Llama has no layers for multi-token prediction"),
        ("eagle3=MODEL", "is not a head that drafts"),
        ("dflash=MODEL", "is not a head that drafts"),
    ],
)
def test_what_cannot_draft_is_named(folder, speculate, message):
    with pytest.raises(UnsupportedModel, match=message):
        small_core(folder, "program", speculate=speculate.replace("MODEL", folder))


@pytest.mark.parametrize("option", ["eagle3", "draft"])
def test_a_head_of_its_own_checkpoint_changes_no_answer(tmp_path, option):
    """Also over few blocks full of NaN and with forced preemption."""
    base, requests = base_folder(tmp_path), mixed_requests(96, 200, longest=150)
    s = settings("eagle-3.1")
    head = write(tmp_path / "head", "eagle-3.1", config_of("eagle-3.1", s, [1, 3, 4]), tensors_of(s))
    expected = plain(small_core(str(base), "program", speculate="off"), requests)
    core = small_core(
        str(base), "program", speculate=f"{option}={head}", num_blocks=40, max_num_seqs=6, max_model_len=256
    )
    assert draft_of(core).taps == ("layers.1", "layers.3", "layers.4")
    poison(core, [set(range(pool.num_blocks)) for pool in core.scheduler.kv.pools])
    same(expected, together(core, requests, preempt=0.1))
    core.close()


@pytest.mark.parametrize("variant", ["both ways", "dspark", pytest.param("speculators dspark", marks=pytest.mark.slow)])
def test_a_drafter_of_blocks_changes_no_answer(tmp_path, variant):
    """Also over few blocks full of NaN and with forced preemption."""
    base, requests = base_folder(tmp_path), mixed_requests(96, 200, longest=150)
    s = dflash_heads.settings(variant)
    head = dflash_heads.write(tmp_path / "head", dflash_heads.config_of(s, variant), dflash_heads.tensors_of(s))
    expected = plain(small_core(str(base), "program", speculate="off"), requests)
    core = small_core(
        str(base), "program", speculate=f"dflash={head}", num_blocks=40, max_num_seqs=6, max_model_len=256
    )
    assert draft_of(core).block == 8
    poison(core, [set(range(pool.num_blocks)) for pool in core.scheduler.kv.pools])
    same(expected, together(core, requests, preempt=0.1))
    core.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_assistant_changes_no_answer(tmp_path):
    """It reads the target's blocks, also those that prefixes share and those that have left a window."""
    transformers = pytest.importorskip("transformers", reason="transformers makes the models of this test")
    (base, head), requests = both(transformers, tmp_path), mixed_requests(96, 200, longest=150)
    expected = plain(small_core(str(base), "program", speculate="off"), requests)
    core = small_core(str(base), "program", speculate=f"draft={head}", num_blocks=40, max_num_seqs=6, max_model_len=256)
    assert not draft_of(core).advances
    poison(core, [set(range(pool.num_blocks)) for pool in core.scheduler.kv.pools])
    same(expected, together(core, requests, preempt=0.1))
    core.close()


def test_stored_blocks_of_other_drafters_are_not_found(folder, tmp_path, monkeypatch):
    """They hold the caches of both models. A restart with the same drafter finds its own."""
    monkeypatch.setattr("kvasir.sched.service.Service.prefill_seconds", lambda self, start, tokens: 30.0)
    prompt = request("a", range(5, 105), max_tokens=4)
    expected, loaded = plain(small_core(folder, "program", speculate="off"), [prompt]), []
    for speculate in ("off", f"draft={folder}", "off", f"draft={folder}"):
        core = small_core(folder, "program", speculate=speculate, cache_dir=str(tmp_path / "kv"))
        same(expected, together(core, [prompt]))
        core.close(30.0)
        loaded.append(core.stats().tier_loads)
    assert loaded[:2] == [{}, {}]
    assert [set(found) for found in loaded[2:]] == [{"loaded"}, {"loaded"}]


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gemma3", "qwen3-next"))]
)
@pytest.mark.parametrize("executor", ["program", pytest.param("eager", marks=pytest.mark.slow)])
def test_preemption_and_poisoned_blocks(tmp_path, kind, executor):
    """With few blocks and forced preemption, over blocks full of NaN."""
    folder, requests = random_model(kind, tmp_path), mixed_requests(300, 200, longest=150)
    expected = plain(small_core(folder, executor, speculate="off"), requests)
    core = small_core(folder, executor, speculate=f"draft={folder}", num_blocks=40, max_num_seqs=6)
    poison(core, [set(range(pool.num_blocks)) for pool in core.scheduler.kv.pools])
    same(expected, together(core, requests, preempt=0.1))
    assert core.stats().drafted_tokens > 0
    core.close()
