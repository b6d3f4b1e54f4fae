"""Drafts on the graph executor: the same bits as token by token, on the device and on the host."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from kvasir.runner import host_sampling
from kvasir.runner.runner import Runner
from kvasir.types import Request, SamplingParams
from tests.graph.models import folder_of, graph_core
from tests.oracle import plain, same, together
from tests.runner.drafted import Sequences
from tests.sched.one_by_one import OneByOne

DEVICE = ["greedy", "described", "output", "words", "mask"]
HOST = ["dry", "mirostat mask"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def expected(folder):
    """Token by token."""
    return Sequences(runner_of(folder), [*DEVICE, *HOST], count=6).run()


def runner_of(folder: str) -> Runner:
    runner = graph_core(folder, max_num_seqs=8, num_blocks=33, dtype="bfloat16").runner
    assert isinstance(runner, Runner)
    return runner


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [DEVICE, [*DEVICE, *HOST]], ids=["device", "device and host"])
def test_the_same_bits_with_drafts(folder, expected, monkeypatch, names):
    on_host: list[int] = []
    take = host_sampling.take
    monkeypatch.setattr(host_sampling, "take", lambda *args: on_host.append(1) or take(*args))
    sequences = Sequences(runner_of(folder), names, expected, count=6)
    assert sequences.run() == {name: expected[name] for name in names}
    assert sequences.accepted > 10 and sequences.drafted > sequences.accepted
    assert bool(on_host) == (names != DEVICE), "the device samples along drafts"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_prompt_of_another_row_is_started_before_a_draft_is_settled(folder):
    own = {"temperature": 0.9, "max_tokens": 7, "ignore_eos": True, "logprobs": 1}
    requests = [Request(f"r{i}", tuple(range(3, 9 + i)), SamplingParams(**own, seed=i)) for i in range(2)]
    expected = plain(graph_core(folder, dtype="bfloat16"), requests)

    class Knowing(OneByOne):
        """Drafts what will come of the first request, with a wrong id now and then; nothing for the second."""

        def waits(self, sequences):
            return any(seq.request.id == "r0" for seq in sequences)

        def guess(self, seq, most):
            if seq.request.id == "r1":
                return []
            coming = expected["r0", 0].tokens[len(seq.tokens) - seq.prompt_len :][:2]
            return [token ^ (len(seq.tokens) % 3 == 0) for token in coming[:most]]

    core = graph_core(folder, dtype="bfloat16", overlap=True, drafter=Knowing())
    assert isinstance(core.runner, Runner)
    followed: list[bool] = []
    runner, follows = core.runner, core.runner.follows

    def following(plan, masks=None):
        under_way = runner._under_way
        found = follows(plan, masks)
        if under_way and any(work.drafted for work in under_way.step.works):
            followed.append(found)
        return found

    core.runner.follows = following
    same(expected, together(core, requests, stagger=1, seed=2))  # the second comes while the first has drafts
    assert core.scheduler.accepted_tokens > 1 and any(followed)
    core.close()
