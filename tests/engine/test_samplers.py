"""The samplers beyond the common ones through a whole engine: in company, preempted, and resumed by another engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.engine.journal import Journal, RequestStage
from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of, random_model
from tests.oracle import Answer, plain, same, together

torch = pytest.importorskip("torch")

ASKED = {
    "plain": {},
    "top-n-sigma": {"top_n_sigma": 0.5},
    "typical-p": {"typical_p": 0.3},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.01},
    "dynamic temperature": {"dynatemp_range": 0.9},
    "mirostat": {"mirostat": 2, "mirostat_tau": 1.5, "mirostat_eta": 0.9},
    "adaptive-p": {"adaptive_target": 0.5, "temperature": 0.1},
    "dry": {"dry_multiplier": 9.0, "dry_allowed_length": 0, "dry_penalty_last_n": -1},
    "bad words": {},  # what the plain one answered: see `requests`
}


def asked(name: str, more: dict) -> Request:
    params = {"temperature": 1.2, "max_tokens": 24, "seed": 11, "logprobs": 1, "ignore_eos": True} | ASKED[name] | more
    prompt = tuple(5 + i % 60 for i in range(70))
    return Request(name, prompt, SamplingParams(**params))


@pytest.fixture(scope="module", params=["program", pytest.param("eager", marks=pytest.mark.slow)])
def case(request, tmp_path_factory):
    """(options, requests, their plain answers)."""
    options = {"model": random_model("llama", tmp_path_factory.mktemp("llama")), "executor": request.param}
    core = core_of(**options, threads=1, max_num_seqs=1)
    alone = plain(core, [asked("plain", {})])["plain", 0].tokens
    words = ((alone[0],), (alone[1],), (alone[2],), (alone[3], alone[4]))
    requests = [asked(name, {}) for name in ASKED]
    requests[-1] = replace(requests[-1], bad_word_ids=words)
    requests.append(replace(asked("mirostat", {"n": 2}), id="two"))
    return options, requests, plain(core, requests)


def test_each_sampler_changes_the_answer(case):
    _, requests, expected = case
    answers = {name: tuple(expected[name, 0].tokens) for name in ASKED}
    assert len(set(answers.values())) == len(ASKED), answers
    bad = {word[0] for word in requests[-2].bad_word_ids if len(word) == 1}
    assert bad & set(answers["plain"]) and not bad & set(answers["bad words"])


@pytest.mark.parametrize("overlap", [False, True])
def test_batching_and_preemption_change_no_token(case, overlap):
    options, requests, expected = case
    core = core_of(**options, threads=2, block_size=16, max_chunk=13, overlap=overlap)
    same(expected, together(core, requests, seed=5, preempt=0.4))
    assert core.stats().preemptions > 5


def test_a_restarted_engine_continues_with_the_same_tokens(case):
    options, requests, expected = case
    journal, answers = Journal(), {key: Answer() for key in expected}
    for request in requests:
        journal.add(request)
    core = core_of(**options, threads=1)
    carried: list[bytes] = []
    for step in range(1000):
        if step == 9:
            assert journal.death() == []
            core = core_of(**options, threads=1)
        for request in journal.to_send():
            carried += [carry for carry in request.resume_carries if carry]
            core.add(request)
            journal.reached([request.id], RequestStage.JOINED)
        if not core.has_work():
            break
        for delta in core.step():
            journal.take(delta)
            answers[delta.id, delta.index].take(delta)
    same(expected, answers)
    assert len(carried) == 4


@pytest.mark.parametrize("name", ["mirostat", "adaptive-p"])
def test_a_sampler_without_its_carry_gives_other_tokens(case, name):
    """So that the test above is one of the carry."""
    options, _, expected = case
    request, whole = asked(name, {}), expected[name, 0].tokens
    core = core_of(**options, threads=1)
    answer = plain(core, [replace(request, resume_ids=(tuple(whole[:12]),))])
    assert answer[name, 0].tokens != whole[12:]
