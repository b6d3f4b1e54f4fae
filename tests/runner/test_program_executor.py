"""ProgramExecutor by hand-written plans and faulty models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.sched import guidance
from tests.engine.cores import random_model
from tests.oracle import plain, same, together
from tests.runner.made import request, small_core

torch = pytest.importorskip("torch")

from kvasir.program import marshal, program  # noqa: E402 - need torch, as the others do
from kvasir.runner import program_executor  # noqa: E402
from kvasir.runner.host_sampling import taken  # noqa: E402
from kvasir.sampling import chain, logprobs, sampler  # noqa: E402
from kvasir.sampling.native import NativeSampler  # noqa: E402
from kvasir.sampling.rows import RowContext  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    return random_model("llama", tmp_path)


def program_core(folder: str, **options):
    core = small_core(folder, "program", **options)
    assert core.info.grade == "exact"
    return core


OPTIONS = {
    "plain": {"top_p": 0.9, "min_p": 0.01, "top_k": 200},
    "typical": {"typical_p": 0.4},
    "sigma": {"top_n_sigma": 0.7},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.001},
    "dynatemp": {"dynatemp_range": 0.9},
    "mirostat": {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.7},
    "adaptive": {"adaptive_target": 0.1},
    "dry": {"dry_multiplier": 5.0, "dry_allowed_length": 0, "dry_penalty_last_n": -1},
    "windows": {"repetition_penalty": 1.5, "repetition_last_n": 5, "frequency_penalty": 0.7, "occurrence_last_n": 9},
    "output": {"presence_penalty": 0.7, "min_tokens": 9, "stop_token_ids": [7, 8], "logit_bias": {3: 2.0}},
    "words": {},
    "prompt": {"prompt_logprobs": 2},
}


def requests_of_all():
    common = {"temperature": 1.1, "max_tokens": 12, "logprobs": 3, "seed": 5}
    prompt = [3 + i % 40 for i in range(50)]
    requests = [request(name, prompt, **(common | options)) for name, options in OPTIONS.items()]
    return [replace(r, bad_word_ids=((7,), (9, 11), (200,))) if r.id == "words" else r for r in requests]


def test_no_option_is_sampled_by_the_reference(folder, monkeypatch):
    """Nor are log-probabilities: what only the reference can do would be done by the engine's thread."""
    used: list[str] = []
    for module, name in ((sampler, "_sample"), (logprobs, "_entries"), (chain, "choose")):
        monkeypatch.setattr(module, name, lambda *args, name=name: used.append(name))
    core = program_core(folder)
    together(core, requests_of_all())
    assert core.runner.rows.used == 0 and used == []


@pytest.mark.parametrize("chosen", [32, 2])
def test_the_reference_would_give_the_same(folder, monkeypatch, chosen):
    """All rows are taken for masked ones, so that their logits stay or are computed again, and sampled elsewhere."""
    expected = plain(program_core(folder), requests_of_all())
    calls: list[int] = []

    def reference(executor, logits, positions):
        contexts = [
            RowContext(row.spec, row.ids[:known], row.prompt_len, known, None, carry)
            for row, known, _, carry in positions
        ]
        calls.append(len(positions))
        return list(map(taken, sampler.sample(torch.from_numpy(logits), contexts)))

    for module in (marshal, program, program_executor):
        monkeypatch.setattr(module, "MAX_CHOSEN", chosen)
    monkeypatch.setattr(guidance, "masked", lambda seq: len(seq.tokens) % 3 > 0)
    monkeypatch.setattr(program_executor.ProgramExecutor, "take", reference)
    monkeypatch.setattr(NativeSampler, "describe", lambda _, x, *args: logprobs.logprobs(torch.from_numpy(x), *args))
    same(expected, together(program_core(folder), requests_of_all()))
    assert sum(calls) > len(OPTIONS)


def test_time_in_kernels_is_counted(folder):
    core = program_core(folder)
    plain(core, [request("a", [1, 2, 3])])
    stats = core.stats()
    assert 0 < stats.kernel_seconds < stats.step_seconds


def test_more_threads_than_work(folder):
    requests = [request("a", [1], temperature=0.7, logprobs=1)]
    expected = plain(program_core(folder), requests)
    same(expected, plain(program_core(folder, threads=7), requests))
