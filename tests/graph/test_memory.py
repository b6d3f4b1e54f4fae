"""Memory of the graph executor: all of it is allocated at the start, and running out of it harms nothing else."""

from __future__ import annotations

import traceback

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvasir.errors import ConfigError
from kvasir.runner.graph_executor import GraphExecutor
from kvasir.runner.runner import Runner
from kvasir.types import Request, SamplingParams
from tests.graph.models import folder_of, graph_core
from tests.oracle import plain, same, together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
KINDS = [{"temperature": 1.0, "logprobs": 1}, {"temperature": 0.0, "prompt_logprobs": 1}]


def requests_of() -> list[Request]:
    return [
        Request(f"r{i}", tuple(range(3, 9 + 5 * i)), SamplingParams(**kind, seed=i, max_tokens=4, ignore_eos=True))
        for i, kind in enumerate(KINDS)
    ]


def executor_of(core) -> GraphExecutor:
    assert isinstance(core.runner, Runner) and isinstance(core.runner.executor, GraphExecutor)
    return core.runner.executor


class Allocations(TorchDispatchMode):
    """Collects the operations of torch whose results lie in memory that they have allocated; those of Triton's
    interpreter, which copies the arguments of a launch, do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage(value) for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)}
        for made in result if isinstance(result, list | tuple) else [result]:
            if isinstance(made, torch.Tensor) and storage(made) not in given and not within_interpreter():
                self.found.append(str(func))
        return result


def within_interpreter() -> bool:
    return any(frame.filename.endswith("triton/runtime/interpreter.py") for frame in traceback.extract_stack())


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_steps_allocate_nothing(tmp_path):
    core = graph_core(folder_of(tmp_path, "llama"))
    executor = executor_of(core)
    mode, compute = Allocations(), executor.compute

    def watched(step):
        with mode:
            return compute(step)

    executor.compute = watched
    plain(core, requests_of())
    assert not mode.found, set(mode.found)
    with mode:
        torch.zeros(3)
    assert mode.found, "the mode sees no allocation"


@pytest.mark.parametrize("lasts", [0, 3, 30])
def test_memory_that_runs_out_at_the_start_is_an_error_with_advice(lasts, tmp_path, monkeypatch):
    folder, left, zeros = folder_of(tmp_path, "llama"), [lasts], torch.zeros

    def scarce(*shape, **more):
        if str(more.get("device", "cpu")) != "meta":
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(*shape, **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", scarce)
        with pytest.raises(ConfigError, match="memory ran out for the KV cache") as caught:
            graph_core(folder)
    assert "--max-num-seqs" in str(caught.value)
    graph_core(folder).close()


def test_memory_that_runs_out_in_a_step_changes_no_answer(tmp_path):
    """The requests of the step are computed again, each alone."""
    folder = folder_of(tmp_path, "llama")
    expected = plain(graph_core(folder, max_num_seqs=1), requests_of())
    core = graph_core(folder)
    executor, failed = executor_of(core), []
    compute = executor.compute

    def scarce(step):
        if len(step.works) > 1 and not failed:
            failed.append(step)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(step)

    executor.compute = scarce
    same(expected, together(core, requests_of()))
    assert failed
    core.check()
