"""ProgramRunner by hand-written plans and faulty models."""

from __future__ import annotations

import pytest

from tests.engine.cores import random_model
from tests.oracle import plain, same, together
from tests.runner.made import request, small_core

torch = pytest.importorskip("torch")


@pytest.fixture
def folder(tmp_path):
    return random_model("llama", tmp_path)


def program_core(folder: str, **options):
    core = small_core(folder, "program", **options)
    assert core.info.grade == "exact"
    return core


def test_what_the_native_sampler_has_no_code_for_is_sampled_by_the_reference(folder, monkeypatch):
    import kvasir.runner.program_runner as module

    requests = [
        request("a", [1, 2, 3], temperature=0.8, top_p=0.9, logprobs=3),
        request("b", [4, 5], temperature=1.2, repetition_penalty=1.3, logprobs=2),
        request("c", [6, 7, 8, 9], prompt_logprobs=2),
    ]
    expected = plain(program_core(folder), requests)
    monkeypatch.setattr(module, "covers", lambda spec: False)
    same(expected, together(program_core(folder), requests))


def test_time_in_kernels_is_counted(folder):
    core = program_core(folder)
    plain(core, [request("a", [1, 2, 3])])
    stats = core.stats()
    assert 0 < stats.kernel_seconds < stats.step_seconds


def test_more_threads_than_work(folder):
    requests = [request("a", [1], temperature=0.7, logprobs=1)]
    expected = plain(program_core(folder), requests)
    same(expected, plain(program_core(folder, threads=7), requests))
