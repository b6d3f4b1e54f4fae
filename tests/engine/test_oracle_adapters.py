"""Requests with and without adapters over the same prompts, on real executors: together equals alone, and only equal
ones share what is cached."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvasir.engine.core import EngineCore
from kvasir.inputs import Adapter
from kvasir.layers.adapters import slots
from kvasir.lora import read_adapter
from kvasir.sched import admission
from kvasir.types import Request
from tests.engine.cores import core_of, random_model
from tests.layers.adapted import adapter_of
from tests.lora.made import write_peft
from tests.oracle import mixed_requests, plain, same, together

NAMES = ("x", "y")


def adapter(name: str, scale: float = 1.0, start: int = 0) -> Adapter:
    return Adapter(name, scale, start, content=name)


class Made:
    """Loads adapters that are in memory."""

    def __init__(self, made: dict[str, Any]):
        self.made = made

    def begin(self, path: str, content: str) -> Future:
        done: Future = Future()
        done.set_result(self.made[content])
        return done

    def close(self) -> None: ...


def adapted_core(folder: str, executor: str, **options) -> EngineCore:
    """With two random adapters."""
    core = core_of(folder, executor=executor, threads=1, block_size=16, **options)
    made: dict[str, Any] = {}
    for i, name in enumerate(NAMES):
        rng, pairs = np.random.default_rng(i), {}
        for slot, (linear, part) in slots(core.runner.executor.model).items():
            a = rng.standard_normal((4, linear.inputs), np.float32) * linear.inputs**-0.5
            pairs[slot] = a, rng.standard_normal((linear.outputs[part], 4), np.float32) * 0.5, 0.3
        made[name] = core.runner.executor.pack_adapter(adapter_of(pairs))
    core.scheduler.adapters._loader = Made(made)
    return core


def requests() -> list[Request]:
    """The same prompts for each adapter and for none, for several, and for some that begin later."""
    found = mixed_requests(300, 160, count=3, longest=70)
    several = (adapter("x", 0.5), adapter("y", -1.0, 9))
    adapters = [(), *((adapter(name),) for name in NAMES), several, (adapter("y", 1.0, 37),)]
    return [replace(r, id=f"{r.id} {i}", adapters=chosen) for r in found for i, chosen in enumerate(adapters)]


def compare(folder: str, executor: str) -> None:
    expected = plain(adapted_core(folder, executor, num_blocks=60), requests())
    core = adapted_core(folder, executor, num_blocks=30, max_num_seqs=5, max_num_batched_tokens=29, prefix_cache=True)
    same(expected, together(core, requests(), preempt=0.05))
    assert core.stats().cached_tokens > 0


@pytest.mark.parametrize("executor", ["program", pytest.param("eager", marks=pytest.mark.slow)])
def test_adapters_together_equal_alone(tmp_path: Path, executor: str):
    compare(random_model("llama", tmp_path), executor)


def test_drafts_of_the_base_model_change_nothing(tmp_path: Path):
    folder = random_model("llama", tmp_path)
    expected = plain(adapted_core(folder, "program", num_blocks=60, speculate="off"), requests())
    core = adapted_core(folder, "program", num_blocks=60, max_num_seqs=5, speculate=f"draft={folder}")
    drafter: Any = core.scheduler.drafter
    drafter.pays, drafter.asks = lambda rows, predicted: True, lambda seq, most: min(most, 3)  # whatever the time
    same(expected, together(core, requests()))
    assert core.stats().drafted_tokens > core.stats().accepted_tokens > 0


def written(folder: Path, count: int) -> list[Adapter]:
    """Random adapters of q and v in peft's form, with names of their own."""
    made, shapes = [], {"q_proj": (64, 64), "v_proj": (32, 64)}
    for i in range(count):
        rng, tensors = np.random.default_rng(i), {}
        for layer, (name, (outputs, inputs)) in itertools.product(range(2), shapes.items()):
            at = f"model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = rng.standard_normal((4, inputs), np.float32) * 0.3
            tensors[f"{at}.lora_B.weight"] = rng.standard_normal((outputs, 4), np.float32) * 0.3
        path = write_peft(folder / f"a{i}", tensors, target_modules=list(shapes))
        made.append(Adapter(f"a{i}", content=read_adapter(path).content, path=str(path), nbytes=8192))
    return made


def test_adapters_that_come_and_go_equal_those_that_are_alone(tmp_path: Path):
    """Five adapters, of which two fit: each is read from its files again and again, beside the steps."""
    folder, made = random_model("llama", tmp_path), written(tmp_path / "adapters", 5)
    chosen = [(), *((one,) for one in made), (replace(made[3], scale=0.5), made[1])]
    found = mixed_requests(300, 160, count=2, longest=40)
    asked = [replace(r, id=f"{r.id} {i}", adapters=adapters) for r in found for i, adapters in enumerate(chosen)]
    options: dict[str, Any] = {"executor": "program", "threads": 1, "block_size": 16}
    expected = plain(core_of(folder, **options), asked)
    core = core_of(folder, **options, max_loras=2, max_num_seqs=5, num_blocks=30)
    same(expected, together(core, asked, preempt=0.05))
    stats = core.stats()
    assert stats.adapters_evictions >= 3 and stats.adapters_resident == 2
    core.close()


def test_a_key_without_the_adapter_is_noticed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(admission.inputs, "scope", lambda inputs, adapters: b"")
    with pytest.raises(AssertionError, match="differ"):
        compare(random_model("llama", tmp_path), "program")
