"""ModelRunner: carries out plans with a model. Owns the rows, the KV tensors and the model.

`execute` and `sample` hand their work to one thread, in order, and `execute` returns at once: the caller may think
while the forward runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kvasir.layers.adapters import Pairs, set_adapter
from kvasir.layers.batch import Batch, Slice, make_batch
from kvasir.layers.kv_cache import KVCache
from kvasir.plan import Capacity, RowResult, StepPlan, StepResult, Work
from kvasir.runner.blocks import BlockCache, Copies, Exported, StagedBlocks, landed, move_blocks
from kvasir.runner.rows import Row, Rows
from kvasir.sampling.logprobs import BadLogits, logprobs
from kvasir.sampling.sampler import RowContext, Sampled, sample
from kvasir.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Forward:
    """What a forward leaves for sampling: logits_SV float32 of the rows that sample, in the order of `samplers`.
    hidden: what works wanted, by their places. saved: what the plan's `saves` give."""

    plan: StepPlan
    samplers: tuple[int, ...]
    logits_SV: torch.Tensor | None
    partial: dict[int, RowResult]
    hidden: dict[int, tuple[tuple[str, bytes], ...]] = field(default_factory=dict)
    saved: tuple[Exported, ...] = ()


class ModelRunner:
    """`model` as models/ makes them; `capacity` and `info` are what the scheduler and the front half may know. hidden:
    names of the hidden states that work may want. copies: for blocks that come and go beside the computing."""

    def __init__(
        self,
        model,
        cache: KVCache,
        capacity: Capacity,
        info: ModelInfo,
        device: torch.device,
        overlaps: bool = False,
        hidden: Sequence[str] = (),
        copies: Copies | None = None,
    ):
        self.model = model
        self.cache = cache
        self._copies = copies
        self._blocks: BlockCache = StagedBlocks(cache, copies) if copies else cache
        self.capacity = capacity
        self.info = info
        self.device = device
        self.kernel_seconds = 0.0
        self.overlaps = overlaps
        self.hidden = frozenset(hidden)
        groups, size, vocab = len(capacity.groups), capacity.block_size, capacity.vocab_size
        self.rows = Rows(capacity.max_rows, capacity.max_model_len, groups, size, vocab)
        self._thread = ThreadPoolExecutor(1, "kvasir-runner")

    def execute(self, plan: StepPlan) -> Future[Forward]:
        """Starts the forward of a plan. Errors appear in `sample`; the rows are those of the plan even then."""
        return self._thread.submit(self._forward, plan)

    def sample(self, pending: Future[Forward], masks: Mapping[int, bytes] = {}) -> StepResult:
        """Waits for the forward and samples. Raises whatever the forward or the sampler raised."""
        return self._thread.submit(self._sample, pending, masks).result()

    def set_adapter(self, adapter: int, pairs: Pairs | None) -> None:
        """See Program.set_adapter."""
        self._thread.submit(set_adapter, self.model, adapter, pairs or {}).result()
        (self.rows.adapters.discard if pairs is None else self.rows.adapters.add)(adapter)

    def close(self) -> None:
        """Waits for a step in progress and ends the threads. Twice does no harm."""
        self._thread.shutdown()
        if self._copies:
            self._copies.close()

    # -- forward -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> Forward:
        self.rows.apply(plan)
        saved = move_blocks(self._blocks, plan)
        alive = [w for w in plan.work if not self.rows[w.row].fault]
        if not alive:
            broken = {i: RowResult(w.row, error=self.rows[w.row].fault) for i, w in enumerate(plan.work)}
            return Forward(plan, (), None, broken, saved=saved)
        wanted = frozenset(name for w in alive for name in w.want_hidden)
        assert wanted <= self.hidden, "hidden states that were not wished for at load"
        batch = make_batch([self._slice(w) for w in alive], self.cache, self.device, wanted)
        hidden_TD = batch.hidden["last"] = self.model.forward(batch.tokens_T, batch)
        return replace(self._outputs(plan, batch, hidden_TD), saved=saved)

    def _slice(self, work: Work) -> Slice:
        row = self.rows[work.row]
        end = work.start + work.count
        assert end <= row.known, "work beyond the known tokens"
        return Slice(
            ids=row.ids[work.start : end],
            start=work.start,
            block_tables=tuple(row.tables),
            causal=not work.indivisible,
            adapter=row.adapter,
        )

    def _outputs(self, plan: StepPlan, batch: Batch, hidden_TD: torch.Tensor) -> Forward:
        samplers: list[int] = []
        last: list[int] = []
        partial: dict[int, RowResult] = {}
        hidden: dict[int, tuple[tuple[str, bytes], ...]] = {}
        begin = 0
        for i, work in enumerate(plan.work):
            if fault := self.rows[work.row].fault:
                partial[i] = RowResult(work.row, error=fault)
                continue
            end = begin + work.count
            if work.sample:
                samplers.append(i)
                last.append(end - 1)
            if any(work.read):
                partial[i] = self._read(work, hidden_TD[begin:end])
            if work.want_pooled:
                pooled_D = self.model.pool(hidden_TD[begin:end])
                partial[i] = RowResult(work.row, pooled=_bytes(pooled_D))
            hidden[i] = tuple((name, _bytes(batch.hidden[name][begin:end])) for name in work.want_hidden)
            begin = end
        logits_SV = self.model.logits(hidden_TD[torch.tensor(last, device=self.device)]) if last else None
        return Forward(plan, tuple(samplers), logits_SV, partial, hidden)

    def _read(self, work: Work, hidden_nD: torch.Tensor) -> RowResult:
        """Log-probabilities of known ids, a tile of rows at a time."""
        entries: list = []
        for first in range(*work.read, 32):
            end = min(first + 32, work.read[1])
            logits_nV = self.model.logits(hidden_nD[first - work.start : end - work.start])[: end - first]
            try:
                entries += logprobs(logits_nV, *self.rows[work.row].read(first, end))
            except BadLogits as error:
                return RowResult(work.row, error=str(error))
        return RowResult(work.row, read=tuple(entries))

    # -- sampling ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _sample(self, pending: Future[Forward], masks: Mapping[int, bytes]) -> StepResult:
        forward = pending.result()
        work = forward.plan.work
        contexts = [_context(self.rows[work[i].row], masks.get(work[i].row)) for i in forward.samplers]
        sampled: list[Sampled] = sample(forward.logits_SV, contexts) if forward.logits_SV is not None else []
        by_work = dict(zip(forward.samplers, sampled, strict=True))
        results = (self._result(i, w, by_work.get(i), forward.partial.get(i)) for i, w in enumerate(work))
        full = tuple(replace(result, hidden=forward.hidden.get(i, ())) for i, result in enumerate(results))
        return self.rows.noted(StepResult(forward.plan.step, full, landed(forward.saved)))

    def _result(self, i: int, work: Work, sampled: Sampled | None, partial: RowResult | None) -> RowResult:
        if sampled is None:
            return partial or RowResult(work.row)
        if error := sampled.error or (partial.error if partial else ""):
            return RowResult(work.row, error=error)
        row = self.rows[work.row]
        row.append(sampled.token)
        row.carry = sampled.carry
        return RowResult(
            work.row,
            tokens=(sampled.token,),
            logprobs=(sampled.logprob,) if sampled.logprob is not None else (),
            read=partial.read if partial else (),
            carry=sampled.carry,
        )


def _bytes(rows: torch.Tensor) -> bytes:
    return rows.float().cpu().numpy().tobytes()


def _context(row: Row, mask: bytes | None) -> RowContext:
    words = None if mask is None else np.frombuffer(mask, np.int32)
    return RowContext(row.spec, row.ids[: row.known], row.prompt_len, row.known, words, row.carry)
