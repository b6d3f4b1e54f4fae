"""Models with adapters, as engines compute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.engine.core import EngineCore
from kvasir.inputs import Adapter
from kvasir.lora import Adapter as LoraAdapter
from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of
from tests.engine.test_oracle_adapters import Made


def adapted_core(base: Path | str, executor: str, adapters: Mapping[str, LoraAdapter], **options) -> EngineCore:
    """A core of a model with adapters by name."""
    options = {"threads": 1, "block_size": 16, "dtype": "float32", **options}
    core = core_of(str(base), executor=executor, **options)
    executing: Any = core.runner
    made = {name: executing.executor.pack_adapter(adapter) for name, adapter in adapters.items()}
    core.scheduler.adapters._loader = Made(made)
    return core


def request(ids: Sequence[int], chosen: Sequence[Adapter] = (), id: str = "r", **params: Any) -> Request:
    """A request for the log-probabilities of all ids after each of these."""
    sampled = SamplingParams(max_tokens=1, temperature=0.0, **params)
    return Request(id, tuple(ids), sampled, adapters=tuple(replace(one, content=one.name) for one in chosen))


def log_probabilities(core: EngineCore, ids: Sequence[int], *chosen: Adapter) -> np.ndarray:
    """Of the likeliest ids after each of the given ids, float32 [len(ids), vocabulary], NaN for the others. chosen: the
    adapters."""
    vocab = core.runner.capacity.vocab_size
    most = min(vocab, 128)
    core.add(request(ids, chosen, prompt_logprobs=most, logprobs=most))
    entries = []
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            entries += (delta.prompt_logprobs or [])[1:]
            entries += delta.logprobs
    found = np.full((len(ids), vocab), np.nan, np.float32)
    for row, entry in zip(found, entries, strict=True):
        tokens, values = zip(*entry.top, strict=True)
        row[list(tokens)] = values
    return found
