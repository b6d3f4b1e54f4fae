"""The graph executor: replays recorded launches over buffers on a device. Steps queue: sampled ids are written where
the next step reads them, and the host gets them later.

One thread follows the plans and launches in order, so the caller can plan while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from kvasir.graph.adapter_packing import PackedAdapter, Packing
from kvasir.graph.adapters import Adapters
from kvasir.graph.draws import Draws
from kvasir.graph.forward import Forward
from kvasir.graph.triton import NO_TOKEN
from kvasir.layers.kv_cache import KVCache
from kvasir.lora import Adapter
from kvasir.plan import Join, StepPlan
from kvasir.program.shared_packing import SharedAdapter
from kvasir.runner import host_sampling
from kvasir.runner.blocks import BlockCache, Copies, Exported, StagedBlocks, move_blocks, wait_all
from kvasir.runner.computed import refuse
from kvasir.runner.device_rows import DeviceRows
from kvasir.runner.executor import Entry, ExecutorStep, Taken
from kvasir.runner.graph_ranks import Lead, SharedBlocks
from kvasir.runner.graph_replays import Record, Replays
from kvasir.runner.graph_sampling import GraphSampler, Sampling
from kvasir.runner.rows import Row, Rows

NAME = "the graph executor"


@dataclass(slots=True)
class Results:
    """Results of a step; the dictionaries are by place."""

    sampling: Sampling | None = None
    read: dict[int, tuple[tuple[Entry, ...], str]] = field(default_factory=dict)
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    hidden: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    saved: tuple[Exported, ...] = ()


class GraphExecutor:
    """model: pools embeddings. max_tokens, max_chosen: the largest buckets. record: makes a replay of launches. copies:
    transfers blocks while the device computes. lead: tells the other ranks, None if there are none."""

    lead: Lead | None = None

    computes = frozenset(("drafted", "adapters"))
    queues = True
    columns = False
    grows = ()

    def __init__(
        self, model: Any, forward: Forward, *, max_tokens: int, max_chosen: int, record: Record,
        overlaps: bool = False, copies: Copies | None = None,
    ):  # fmt: skip
        self.model, self.forward = model, forward
        self.hidden = frozenset(forward.exports)
        self._overlaps, self._copies = overlaps, copies
        self._blocks: BlockCache = StagedBlocks(forward.cache, copies) if copies else forward.cache
        self.draws = None if forward.logits is None else Draws(forward.step.ids, max_chosen, forward.logits.width)
        self.replays = Replays(forward, self.draws, max_tokens, max_chosen, record)
        self._pieces = np.zeros(tuple(forward.step.pieces.shape), np.int32)
        self.after: Callable[[ExecutorStep], None] = lambda step: None  # called when a step's rows are launched
        self._latest = -1  # the number of the last step
        self.sampler: GraphSampler | None = None  # after `bind`, if the model has logits
        self.packing = Packing(forward.places, forward.device)
        self._thread = ThreadPoolExecutor(1, "kvasir-runner")

    @property
    def cache(self) -> KVCache | SharedBlocks:
        return SharedBlocks(self.forward.cache, self.lead.size, self._export) if self.lead else self.forward.cache

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.forward.device

    @property
    def overlaps(self) -> bool:
        return self._overlaps

    def bind(self, rows: Rows) -> None:
        self.rows = DeviceRows(deepcopy(rows), self.forward.step)
        if self.draws:
            vocab = self.model.config.vocab_size
            self.sampler = GraphSampler(self.forward, self.draws, self.replays, self.rows, vocab)

    def enter(self, join: Join, row: Row) -> None: ...

    def settle(self) -> None: ...

    def start(self, step: ExecutorStep) -> GraphHandle:
        return GraphHandle(self, step, self.submit(self.compute, step))

    def check_adapter(self, adapter: Adapter) -> None:
        if what := self.forward.places.unknown(adapter):
            refuse(NAME, what)

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter | SharedAdapter:
        self.check_adapter(adapter)
        if self.lead:
            return self.lead.pack_adapter(adapter)
        return self.packing.pack(adapter, self.packing.squares(adapter))

    def set_adapter(self, adapter: int, packed: Any) -> None:
        """As EagerExecutor.set_adapter. Without `add_adapters` before, the first one makes room for all."""
        self.submit(self._set_adapter, adapter, packed).result()

    def add_adapters(self) -> Adapters:
        """Makes room for adapters, and records the launches for them."""
        if self.forward.adapters is None:
            self.forward.add_adapters()
            if self.device.type == "cuda":
                self.replays.record_all()
        assert self.forward.adapters is not None
        return self.forward.adapters

    def close(self) -> None:
        self._thread.shutdown()
        if self._copies:
            self._copies.close()
        if self.lead:
            self.lead.close()

    def submit(self, *call: Any) -> Future:
        return self._thread.submit(*call)

    # -- on the thread

    def _set_adapter(self, adapter: int, packed: Any) -> None:
        with self.lead.install(adapter, packed) if self.lead else nullcontext(packed) as own:
            self.install(adapter, own)

    def install(self, adapter: int, packed: PackedAdapter | None) -> None:
        """As `set_adapter`, on this rank and its thread."""
        self.add_adapters().set(adapter, packed)
        (self.rows.host.adapters.add if packed is not None else self.rows.host.adapters.discard)(adapter)

    @torch.inference_mode()
    def compute(self, step: ExecutorStep) -> Results:
        """Follows the step's plan, moves its blocks, then computes its works."""
        with self.lead.step(step) if self.lead else nullcontext():
            return self._compute(step)

    def _export(self, plan: StepPlan) -> memoryview:
        """The block that a plan saves, which does nothing else."""
        return self.start(ExecutorStep(plan, (), (0,), (), ())).saved()[0]

    def _compute(self, step: ExecutorStep) -> Results:
        if self.sampler:
            # What earlier steps drew is on the host already.
            self.sampler.collect(under_way=self._latest, rows={work.row for work in step.plan.work})
        self._latest = step.plan.step
        self.rows.follow(step.plan)
        if self.sampler:
            for join in step.plan.joined:
                self.sampler.enter(join.row)
        found = Results(saved=move_blocks(self._blocks, self.lead.own(step.plan) if self.lead else step.plan))
        if step.works:
            self._write_pieces(step)
            self._choose_launches(step)
            self.replays("rows", step.starts[-1])
            self._keep(found, step)
            self.after(step)
            if self.sampler:
                found.sampling = self.sampler.sample(step)
        return found

    def _choose_launches(self, step: ExecutorStep) -> None:
        """Launches with adapters only where they change something of the step."""
        found = {adapter for work in step.works for adapter in self.rows.adapters(work.row, work.end)}
        adapters = self.forward.adapters
        chosen = adapters is not None and adapters.change_chosen(found)
        self.replays.adapted = frozenset(name for name, given in (("rows", found), ("chosen", chosen)) if given)

    def _write_pieces(self, step: ExecutorStep) -> None:
        pieces = self._pieces
        pieces[:] = 0, 0, 0, NO_TOKEN, 0
        for at, work in enumerate(step.works):
            pieces[at] = work.row, work.start, work.count, step.starts[at], work.indivisible
        self.rows.writer.fill(self.forward.step.pieces, pieces)

    def _keep(self, found: Results, step: ExecutorStep) -> None:
        """Copies the outputs that works want to the host."""
        for at, work in enumerate(step.works):
            first, end = step.starts[at], step.starts[at + 1]
            if work.want_pooled:
                name = getattr(self.model, "outputs", {}).get(work.want_pooled)
                source = self.forward.hidden if name is None else self.forward.exports[name]
                found.pooled[at] = self.model.pool(_host(self.forward.value(source, end)[first:]), work.want_pooled)
            for name in work.want_hidden:
                found.hidden[at, name] = _host(self.forward.value(self.forward.exports[name], end)[first:])
            if any(work.read):
                found.read[at] = self._read(self.rows.host[work.row], step, at)

    def _read(self, row: Row, step: ExecutorStep, at: int) -> tuple[tuple[Entry, ...], str]:
        """Log-probabilities of a work's known ids, or an error."""
        sampler, first = self.sampler, step.starts[at]
        assert sampler is not None

        def entries(begin: int, end: int, ids: Sequence[int], best: Sequence[int]) -> Sequence[Entry]:
            return sampler.entries(range(first + begin, first + end), ids, best)

        return host_sampling.read(row, step.works[at], self.replays.max_chosen, entries)

    @torch.inference_mode()
    def draw(self, handle: GraphHandle, at: Sequence[int], masks: Sequence[bytes | None]) -> Sampling:
        """Samples works with their masks."""
        results = handle.future.result()
        with self.lead.draw(at, masks) if self.lead else nullcontext():
            return self.draw_works(results, handle.step, at, masks)

    @torch.inference_mode()
    def draw_works(
        self, results: Results, step: ExecutorStep, at: Sequence[int], masks: Sequence[bytes | None]
    ) -> Sampling:
        """Samples works of the last step with their masks, on this rank."""
        assert self.sampler is not None and results.sampling is not None
        return self.sampler.sample_masked(results.sampling, step, at, masks)


@dataclass(slots=True)
class GraphHandle:
    """A pending step on the executor's thread."""

    executor: GraphExecutor
    step: ExecutorStep
    future: Future[Results]
    masked: Future[Sampling] | None = None

    def wait(self) -> float:
        if sampling := self.future.result().sampling:
            for drawn in sampling.drawn:
                drawn.fetched()
        return 0.0

    def decoded(self) -> NoReturn:
        raise AssertionError("this executor does not support columns")

    def taken(self) -> list[Taken]:
        sampling, sampler = self.future.result().sampling, self.executor.sampler
        return sampler.read(sampling, self.step.now) if sampler and sampling else []

    def begin(self, at: Sequence[int], masks: Sequence[bytes | None]) -> bool:
        self.masked = self.executor.submit(self.executor.draw, self, at, masks)
        return True

    def take(self, at: Sequence[int], masks: Sequence[bytes | None]) -> list[Taken]:
        assert self.executor.sampler is not None
        masked = self.masked or self.executor.submit(self.executor.draw, self, at, masks)
        return self.executor.sampler.read(masked.result(), at)

    def read(self, at: int) -> tuple[tuple[Entry, ...], str]:
        return self.future.result().read[at]

    def pooled(self, at: int) -> bytes:
        return self.future.result().pooled[at].tobytes()

    def hidden(self, at: int, name: str) -> bytes:
        return self.future.result().hidden[at, name].tobytes()

    def saved(self) -> tuple[memoryview, ...]:
        saved, lead = wait_all(self.future.result().saved), self.executor.lead
        return lead.whole(self.step.plan, saved) if lead else saved


def _host(rows: Tensor) -> np.ndarray:
    return rows.cpu().float().numpy()
