"""The eager executor: plain torch, op by op, on any device. The reference, and the fallback where no program can run.

One thread computes steps in order, and `start` returns at once, so the caller can plan while the forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from kvasir.layers.batch import Batch, InputBuffers, make_batch
from kvasir.layers.kv_cache import KVCache
from kvasir.lora import Adapter
from kvasir.plan import Join, Work
from kvasir.runner import host_sampling
from kvasir.runner.blocks import BlockCache, Copies, Exported, StagedBlocks, move_blocks, wait_all
from kvasir.runner.eager_adapters import EagerAdapters, Packed, in_effect
from kvasir.runner.executor import Entry, ExecutorStep, Taken
from kvasir.runner.rows import Row, Rows
from kvasir.sampling.logprobs import logprobs

_TILE = 32  # token rows whose log-probabilities are read at a time


@dataclass(slots=True)
class Results:
    """Results of a step. logits: float32 [n, V], of the last 1 + drafted token rows of the works of `ExecutorStep.now`,
    then of `ExecutorStep.later`. taken: in the order of `ExecutorStep.now`. The dictionaries are by place in the step.
    """

    logits: Tensor | None = None
    taken: list[Taken] = field(default_factory=list)
    read: dict[int, tuple[tuple[Entry, ...], str]] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    hidden: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    saved: tuple[Exported, ...] = ()


class EagerExecutor:
    """model: a model of kvasir.models. max_tokens: most token rows of a step. hidden: names of the outputs that work
    may want. copies: transfers blocks while the device computes. taps: names of outputs to keep, for all token rows of
    the last step, in `tapped`."""

    computes = frozenset(("drafted", "second", "adapters"))
    queues = False
    columns = False
    grows = ()

    def __init__(
        self, model: Any, cache: KVCache, max_tokens: int, *, overlaps: bool = False, hidden: Sequence[str] = (),
        copies: Copies | None = None,
    ):  # fmt: skip
        self.model, self._cache, self._max_tokens, self._overlaps = model, cache, max_tokens, overlaps
        self.hidden = frozenset(hidden)
        self.taps: frozenset[str] = frozenset()
        self.tapped: dict[str, Tensor] = {}
        self._copies = copies
        self._blocks: BlockCache = StagedBlocks(cache, copies) if copies else cache
        self._adapters = EagerAdapters(model, cache.device)
        self._adapted: list[tuple[tuple[int, float], ...]] = []  # of each token row of the last step
        self._thread = ThreadPoolExecutor(1, "kvasir-runner")

    @property
    def cache(self) -> KVCache:
        return self._cache

    @property
    def overlaps(self) -> bool:
        return self._overlaps

    def bind(self, rows: Rows) -> None:
        self.rows = rows
        self._inputs = InputBuffers(self._max_tokens, len(self._cache.groups), self._cache.device)

    def enter(self, join: Join, row: Row) -> None: ...

    def settle(self) -> None: ...

    def start(self, step: ExecutorStep) -> EagerHandle:
        return EagerHandle(self, step, self.submit(self.compute, step))

    def check_adapter(self, adapter: Adapter) -> None:
        self._adapters.check(adapter)

    @torch.inference_mode()
    def pack_adapter(self, adapter: Adapter) -> Packed:
        return self._adapters.pack(adapter)

    def set_adapter(self, adapter: int, packed: Packed | None) -> None:
        self._thread.submit(self._adapters.set, adapter, packed).result()

    def close(self) -> None:
        self._thread.shutdown()
        if self._copies:
            self._copies.close()

    # -- on the thread

    @torch.inference_mode()
    def compute(self, step: ExecutorStep) -> Results:
        """Moves the step's blocks, then computes its works; runs on the thread."""
        found = Results(saved=move_blocks(self._blocks, step.plan))
        if step.works:
            self._adapted = [one for work in step.works for one in self._in_effect(work)]
            batch = self.batch(step)
            with self._adapters.use(self._adapted):
                hidden_TD = batch.hidden["last"] = self.forward(batch)
            self.tapped = {name: batch.hidden[name].float() for name in self.taps}
            self._keep(found, step, batch, hidden_TD)
        return found

    def batch(self, step: ExecutorStep) -> Batch:
        """The step's token rows as layers read them."""
        wanted = frozenset(name for work in step.works for name in work.want_hidden) | self.taps
        return make_batch(step.works, self.rows.arrays, self._cache, wanted, self._inputs)

    def _in_effect(self, work: Work) -> list[tuple[tuple[int, float], ...]]:
        return in_effect(self.rows[work.row].adapters, work.start, work.count)

    def forward(self, batch: Batch) -> Tensor:
        """The last hidden states, [T, D]."""
        return self.model.forward(batch.tokens_T, batch)

    def _keep(self, found: Results, step: ExecutorStep, batch: Batch, hidden_TD: Tensor) -> None:
        """Stores the outputs that the works want."""
        for at, work in enumerate(step.works):
            mine = slice(step.starts[at], step.starts[at + 1])
            if any(work.read):
                found.read[at] = self._read(work, hidden_TD[mine], step.starts[at])
            if work.want_pooled:
                found.pooled[at] = self.model.pool(
                    _host(self._source(batch, hidden_TD, work.want_pooled)[mine]), work.want_pooled
                )
            for name in work.want_hidden:
                found.hidden[at, name] = batch.output(at, name)
        if chosen := [n for at in (*step.now, *step.later) for n in _sampled(step, at)]:
            found.logits = logits = self._logits(hidden_TD[torch.tensor(chosen, device=hidden_TD.device)], chosen)
            now = [step.works[at] for at in step.now]
            found.taken = self.take(logits[: sum(1 + work.drafted for work in now)], now)

    def _source(self, batch: Batch, hidden_TD: Tensor, task: str) -> Tensor:
        """The rows that a task is pooled from."""
        name = getattr(self.model, "outputs", {}).get(task)
        return hidden_TD if name is None else batch.hidden[name]

    def _logits(self, hidden_nD: Tensor, rows: Sequence[int]) -> Tensor:
        """The logits of some token rows of the last step, float32 [n, V]."""
        with self._adapters.use([self._adapted[row] for row in rows]):
            return self.model.logits(hidden_nD)

    def _read(self, work: Work, hidden_nD: Tensor, start: int) -> tuple[tuple[Entry, ...], str]:
        """Log-probabilities of known ids, or an error. start: the work's first token row."""

        def entries(begin: int, end: int, ids: Sequence[int], best: Sequence[int]) -> Sequence[Entry]:
            logits = self._logits(hidden_nD[begin:end], range(start + begin, start + end))
            return logprobs(logits[: end - begin], ids, best)

        return host_sampling.read(self.rows[work.row], work, _TILE, entries)

    @torch.inference_mode()
    def take(self, logits_nV: Tensor, works: Sequence[Work], masks: Sequence[bytes | None] = ()) -> list[Taken]:
        """Samples for works. logits_nV: of the last 1 + drafted token rows of each."""
        return host_sampling.take(
            logits_nV, [self.rows[work.row] for work in works], works, masks or [None] * len(works)
        )

    def submit(self, *call: Any) -> Future:
        return self._thread.submit(*call)


@dataclass(slots=True)
class EagerHandle:
    """A pending step on the executor's thread."""

    executor: EagerExecutor
    step: ExecutorStep
    future: Future[Results]

    def wait(self) -> float:
        self.future.result()
        return 0.0

    def decoded(self) -> NoReturn:
        raise AssertionError("this executor does not support columns")

    def taken(self) -> list[Taken]:
        return self.future.result().taken

    def begin(self, at: Sequence[int], masks: Sequence[bytes | None]) -> bool:
        return False

    def take(self, at: Sequence[int], masks: Sequence[bytes | None]) -> list[Taken]:
        return self.executor.submit(self.draw, at, masks).result()

    def draw(self, at: Sequence[int], masks: Sequence[bytes | None]) -> list[Taken]:
        """Samples the works at these places; runs on the thread."""
        logits, step = self.future.result().logits, self.step
        assert logits is not None
        chosen = (n for i in (*step.now, *step.later) for n in _sampled(step, i))
        place = {n: at for at, n in enumerate(chosen)}
        rows = torch.tensor([place[n] for i in at for n in _sampled(step, i)], device=logits.device)
        return self.executor.take(logits[rows], [step.works[i] for i in at], masks)

    def read(self, at: int) -> tuple[tuple[Entry, ...], str]:
        return self.future.result().read[at]

    def pooled(self, at: int) -> bytes:
        return self.future.result().pooled[at].tobytes()

    def hidden(self, at: int, name: str) -> bytes:
        return _host(self.future.result().hidden[at, name]).tobytes()

    def saved(self) -> tuple[memoryview, ...]:
        return wait_all(self.future.result().saved)


def _sampled(step: ExecutorStep, at: int) -> range:
    """The token rows after which a work is sampled."""
    end = step.starts[at + 1]
    return range(end - 1 - step.works[at].drafted, end)


def _host(rows: Tensor) -> np.ndarray:
    return rows.float().cpu().numpy()
