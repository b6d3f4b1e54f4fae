"""Adapters on a real engine: what peft computes, and the same bits in any company."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvasir import LLM, LoRARequest, SamplingParams
from kvasir.adapters import chosen_adapters
from kvasir.errors import InvalidRequest, KvasirError, ModelNotFound, UnsupportedModel
from kvasir.ops import native
from tests._shared import need

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")

KINDS = ("plain", "rslora_pat", "dora", "saved", "embed", "tok")
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, logprobs=0)
INVOKED = 16  # where the invocation tokens of `activated` begin in the prompt


@pytest.fixture(scope="module")
def folder() -> Path:
    return need("fixtures", "lora")


@pytest.fixture(scope="module")
def ids(folder) -> list[int]:
    return np.load(folder / "expected.npz")["ids"].tolist()


@pytest.fixture(scope="module")
def activated(folder, ids, tmp_path_factory) -> str:
    """The plain adapter, active after three tokens of the prompt."""
    path = tmp_path_factory.mktemp("activated") / "alora"
    shutil.copytree(folder / "plain", path)
    config = json.loads((path / "adapter_config.json").read_text())
    config["alora_invocation_tokens"] = ids[INVOKED : INVOKED + 3]
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture(scope="module")
def llm(folder, activated):
    lora = {kind: str(folder / kind) for kind in KINDS} | {"activated": activated}
    with LLM(str(folder / "base-llama"), lora=lora, dtype="float32", progress=False, threads=1, block_size=8) as llm:
        yield llm


def scores(output) -> list[float]:
    """Log-probabilities of the prompt's tokens after the first, then of the answer's."""
    prompt = [next(iter(one.values())).logprob for one in output.prompt_logprobs[1:]]
    return [*prompt, *(next(iter(one.values())).logprob for one in output.outputs[0].logprobs)]


def asked(llm, ids, lora=None):
    return llm.generate({"prompt_token_ids": ids}, SCORED, lora=lora)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_peft(llm, folder, ids, kind):
    expected = np.load(folder / "expected.npz")
    for name, lora in (("base-llama", None), (kind, kind)):
        logits = expected[name].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        wanted = logprobs[np.arange(len(ids) - 1), ids[1:]]
        output = asked(llm, ids, lora)
        assert np.abs(np.array(scores(output)[: len(ids) - 1]) - wanted).max() < 1e-4
        assert output.outputs[0].token_ids[0] == logits[-1].argmax()


def test_every_request_gets_the_bits_that_it_gets_alone(llm, ids):
    several: list = [[("plain", 0.5), ("rslora_pat", -2.0)], [("plain", 0.0)], [("embed", 1.0), ("saved", 1.0)]]
    choices = [*several, None, *KINDS, "activated", *several]
    prompts = [ids[: 20 + i] for i in range(len(choices))]
    alone = [scores(asked(llm, prompt, lora)) for prompt, lora in zip(prompts, choices, strict=True)]
    work = [
        lambda p=prompt, c=lora: llm._llm.complete({"prompt_token_ids": p}, SCORED, lora=c)
        for prompt, lora in zip(prompts, choices, strict=True)
    ]
    assert [scores(output) for output in llm._all(work)] == alone
    assert alone[1] == scores(asked(llm, prompts[1])) != scores(asked(llm, prompts[1], "plain"))


def test_an_activated_adapter_is_the_base_model_until_it_is_invoked(llm, ids):
    base, plain, activated = (scores(asked(llm, ids, lora)) for lora in (None, "plain", "activated"))
    assert activated[: INVOKED - 1] == base[: INVOKED - 1] and activated[INVOKED:] != base[INVOKED:]
    assert activated[INVOKED:] != plain[INVOKED:], "keys and values before are the base model's"
    without = [i for i in ids if i != ids[INVOKED]]
    assert scores(asked(llm, without, "activated")) == scores(asked(llm, without))


def test_what_precedes_an_invocation_is_shared_with_the_base_model(llm, ids):
    front = llm._llm.front
    for lora, known in (("activated", INVOKED), ("plain", 0)):
        prompt = [len(lora), *ids[1:]]  # which no other test has
        params = SamplingParams(temperature=0, max_tokens=1)
        cached = []
        for chosen in (None, lora):
            request = front.resolve(prompt, params, adapters=chosen_adapters(chosen) or ())
            (answer,) = llm._wait(front.complete(request))
            cached.append(answer.usage.cached_tokens)
        assert cached == [0, known]


def test_adapters_come_and_go(llm, folder, ids):
    before = scores(asked(llm, ids, "plain"))
    info = llm.load_adapter("new", str(folder / "rslora_pat"))
    assert llm.adapters[-1] == info and scores(asked(llm, ids, "new")) == scores(asked(llm, ids, "rslora_pat"))
    llm.load_adapter("new", str(folder / "plain"), replace=True)
    assert scores(asked(llm, ids, "new")) == before
    llm.unload_adapter("new")
    with pytest.raises(ModelNotFound, match=r"'new'.*known: plain"):
        asked(llm, ids, "new")


def test_lora_requests_of_vllm_load_on_first_use(llm, folder, ids):
    """Of any class: only its fields are read."""
    prompts: list = [{"prompt_token_ids": ids[:n]} for n in (20, 21, 22)]
    plain = LoRARequest("as-vllm", 1, str(folder / "plain"))
    other = SimpleNamespace(lora_name="other", lora_int_id=2, lora_path=str(folder / "rslora_pat"))
    try:
        each = [scores(one) for one in llm.generate(prompts, SCORED, lora_request=[plain, None, other])]
        expected = ("plain", None, "rslora_pat")
        assert each == [
            scores(asked(llm, p["prompt_token_ids"], kind)) for p, kind in zip(prompts, expected, strict=True)
        ]
        assert [info.name for info in llm.adapters[-2:]] == ["as-vllm", "other"]
        for one, lora in zip(llm.generate(prompts, SCORED, lora_request=plain), prompts, strict=True):
            assert scores(one) == scores(asked(llm, lora["prompt_token_ids"], "plain"))
        moved = LoRARequest("as-vllm", 1, str(folder / "rslora_pat"))
        with pytest.raises(InvalidRequest, match=r"is loaded from .*plain'"):
            llm.generate(prompts, SCORED, lora_request=moved)
        llm.generate(prompts, SCORED, lora_request=replace(moved, load_inplace=True))
        assert scores(asked(llm, ids, "as-vllm")) == scores(asked(llm, ids, "rslora_pat"))
    finally:
        for name in ("as-vllm", "other"):
            llm.unload_adapter(name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_request": LoRARequest("x", 1, "/nowhere")}, "nowhere"),
        ({"lora_request": LoRARequest("x", 1)}, "lora_path"),
        ({"lora_request": "plain"}, "lora_name"),
        ({"lora_request": [None, None]}, "1 prompts and 2"),
        ({"lora_request": LoRARequest("a b", 1, "x")}, "'a b'"),
        ({"lora_request": LoRARequest("x", 1, "x"), "lora": "plain"}, "both"),
    ],
)
def test_lora_requests_that_cannot_be(llm, ids, given, message):
    with pytest.raises(KvasirError, match=message):
        llm.generate({"prompt_token_ids": ids}, SCORED, **given)


def test_an_unknown_argument_is_a_mistake(llm, ids):
    with pytest.raises(TypeError, match="lora_requests"):
        llm.generate({"prompt_token_ids": ids}, SCORED, lora_requests=None)


def test_what_cannot_be_is_refused(llm, folder, ids):
    with pytest.raises(InvalidRequest, match="DoRA"):
        asked(llm, ids, [("dora", 0.5)])
    with pytest.raises(InvalidRequest):
        llm.load_adapter("plain", str(folder / "plain"))
    with pytest.raises((UnsupportedModel, ValueError), match="does not have"):
        llm.load_adapter("other", str(folder / "moe_router"))
    with pytest.raises(InvalidRequest, match="scale"):
        asked(llm, ids, [("plain", float("nan"))])
