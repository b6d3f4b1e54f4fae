"""ProgramRunner: carries out plans with a traced program, one native call a step, under which the caller may think.

A row's ids and block tables stay where the kernels read them from joining to leaving; a step is described by a few
integers per sequence. Rows that a grammar masks are sampled by a second native call, from logits that the first one
left, so that masks are made under the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kvasir.layers.adapters import Pairs
from kvasir.plan import Capacity, RowResult, StepPlan, StepResult, Work
from kvasir.program import native
from kvasir.program.cache import NativeCache
from kvasir.program.executor import MAX_CHOSEN, Program
from kvasir.runner.blocks import landed, move_blocks
from kvasir.runner.rows import Row, Rows
from kvasir.sampling.logprobs import BadLogits
from kvasir.sampling.native import SAMPLE_ERRORS, Sampler, SampleRow, entry_of, fill_carry, fill_spec, next_carry
from kvasir.sampling.native import Sampled as SampledRow
from kvasir.sampling.sampler import Sampled
from kvasir.types import ModelInfo


@dataclass(frozen=True, slots=True)
class Ran:
    """A step under way. firsts: per work, its first row; none for a sequence that has failed meanwhile. fast: the works
    that are sampled with the forward. later: those that wait for a mask. started: whether anything is computed. saved:
    the bytes of the plan's `saves`."""

    plan: StepPlan
    firsts: tuple[int | None, ...]
    fast: tuple[int, ...]
    later: tuple[int, ...]
    started: bool
    saved: tuple[memoryview, ...] = ()

    @property
    def left(self) -> dict[int, int]:
        """By work, where the run left its logits; none where they were more than the buffer holds."""
        chosen = (*self.fast, *self.later)
        return {i: at for at, i in enumerate(chosen)} if len(chosen) <= MAX_CHOSEN else {}


class ProgramRunner:
    """`model` pools embeddings; `program` computes; `capacity` and `info` are what others may know."""

    def __init__(self, model: Any, program: Program, capacity: Capacity, info: ModelInfo):
        self.model, self.program = model, program
        self.capacity, self.info = capacity, info
        groups, size, vocab = len(capacity.groups), capacity.block_size, capacity.vocab_size
        self.rows = Rows(capacity.max_rows, capacity.max_model_len, groups, size, vocab)
        self._kept: dict[int, list] = {}  # per row, the arrays its native state points to
        self.kernel_seconds = 0.0

    @property
    def cache(self) -> NativeCache:
        return self.program.cache

    @property
    def overlaps(self) -> bool:
        return self.program.pool.apart

    def execute(self, plan: StepPlan) -> Ran:
        """Starts to compute a plan; the rows are those of the plan even if that fails."""
        self.program.settle()  # the step before runs on where its masks could not be made
        self.rows.apply(plan)
        for join in plan.joined:
            self._enter(join.row)
        saved = landed(move_blocks(self.cache, plan))
        firsts: list[int | None] = []
        fast: list[int] = []
        later: list[int] = []
        count = begin = end = 0
        for i, work in enumerate(plan.work):
            row = self.rows[work.row]
            if row.fault:
                firsts.append(None)
                continue
            assert work.start + work.count <= row.known, "work beyond the known tokens"
            exports = self.program.lowered.exports
            assert all(name in exports for name in work.want_hidden), "hidden states that were not wished for at load"
            item = self.program.works[count]
            item.row, item.flags, item.start, item.count = work.row, _flags(work), work.start, work.count
            if work.sample:
                (later if work.masked else fast).append(i)
                fill_carry(self.program.states[work.row].spec, row.spec, row.carry)
            firsts.append(begin)
            count += 1
            begin += work.count
            end = max(end, work.start + work.count)
        if len(fast) + len(later) > MAX_CHOSEN:  # they would not stay in the buffer
            for item in self.program.works[:count]:
                item.flags &= ~native.WORK_LOGITS
        if count:
            self.program.start(count, end)
        return Ran(plan, tuple(firsts), tuple(fast), tuple(later), count > 0, saved)

    def sample(self, pending: Ran, masks: Mapping[int, bytes] = {}) -> StepResult:
        """Waits for the step; its results. Raises whatever the sampler raised."""
        if pending.started:
            self.program.wait()
            self.kernel_seconds += self.program.seconds
        # What was sampled without the mask that has come after all is sampled again.
        natively = {i: at for at, i in enumerate(pending.fast) if pending.plan.work[i].row not in masks}
        pairs = list(zip(pending.plan.work, pending.firsts, strict=True))
        apart = self._sample_apart(
            {i: first + w.count - 1 for i, (w, first) in enumerate(pairs)
             if w.sample and first is not None and i not in natively},
            pending, masks,
        )  # fmt: skip
        results = (
            self._row_result(work, first, natively.get(i), apart.get(i)) for i, (work, first) in enumerate(pairs)
        )
        return self.rows.noted(StepResult(pending.plan.step, tuple(results), pending.saved))

    def _row_result(self, work: Work, first: int | None, at: int | None, apart: Sampled | None) -> RowResult:
        if first is None:
            return RowResult(work.row, error=self.rows[work.row].fault)
        if at is not None and not any(work.read):
            found = self._native_result(work, at)
        else:
            found = self._result(work, first, at, apart)
        return replace(found, hidden=self._hidden(work, first)) if work.want_hidden else found

    def _hidden(self, work: Work, first: int) -> tuple[tuple[str, bytes], ...]:
        end = first + work.count
        return tuple((name, self.program.export(name, end)[first:].tobytes()) for name in work.want_hidden)

    def set_adapter(self, adapter: int, pairs: Pairs | None) -> None:
        """See Program.set_adapter."""
        self.program.set_adapter(adapter, pairs)
        (self.rows.adapters.discard if pairs is None else self.rows.adapters.add)(adapter)

    def close(self) -> None:
        """Waits for a step in progress and ends the threads. Twice does no harm."""
        self.program.close()

    def __del__(self) -> None:
        if hasattr(self, "program"):  # its threads read the rows
            self.close()

    # -- rows

    def _enter(self, index: int) -> None:
        row, state = self.rows[index], self.program.states[index]
        state.ids, state.max_ids = row.ids.ctypes.data, len(row.ids)
        for group, table in enumerate(row.tables):
            state.tables[group], state.table_blocks = table.ctypes.data, len(table)
        state.adapter = row.adapter
        self._kept[index] = [row, *fill_spec(state.spec, row.spec, row.prompt_len, len(row.ids))]

    # -- results

    def _native_result(self, work: Work, at: int) -> RowResult:
        found = self.program.results[at]
        if found.error:
            return RowResult(work.row, error=SAMPLE_ERRORS[found.error])
        row = self.rows[work.row]
        row.known += 1  # the token itself was written by the sampler
        row.carry = next_carry(found, row.spec, row.carry)
        entry = entry_of(found, row.spec.logprobs, self.info.vocab_size)
        return RowResult(work.row, (found.token,), (entry,) if entry else (), carry=row.carry)

    def _result(self, work: Work, first: int, at: int | None, apart: Sampled | None) -> RowResult:
        """Of work that wants more than a token sampled natively, or nothing."""
        if work.want_pooled:
            hidden = torch.from_numpy(self.program.hidden(first + work.count)[first:].copy())
            with torch.inference_mode():
                return RowResult(work.row, pooled=self.model.pool(hidden).float().numpy().tobytes())
        read: tuple = ()
        # The token is taken first: asking for more logits overwrites nothing of it.
        sampled = self._native_result(work, at) if at is not None else None
        if any(work.read):
            try:
                read = self._read(work, first)
            except BadLogits as error:
                return RowResult(work.row, error=str(error))
        if work.sample and sampled is None:
            assert apart is not None
            sampled = self._taken(work, apart)
        if sampled is None or sampled.error:
            return sampled or RowResult(work.row, read=read)
        return RowResult(work.row, sampled.tokens, sampled.logprobs, read, sampled.carry)

    def _read(self, work: Work, first: int) -> tuple:
        """Log-probabilities of known ids. first: the work's first row."""
        entries: list = []
        for begin in range(*work.read, MAX_CHOSEN):
            end = min(begin + MAX_CHOSEN, work.read[1])
            logits = self._logits(range(first + begin - work.start, first + end - work.start))
            entries += self._sampler.describe(logits, *self.rows[work.row].read(begin, end))
        return tuple(entries)

    def _sample_apart(self, ends: dict[int, int], ran: Ran, masks: Mapping[int, bytes]) -> dict[int, Sampled]:
        """Samples works with masks, which were made under the forward. ends: by work, its last row."""
        sampled: dict[int, Sampled] = {}
        for part, logits in self._logits_of(ends, ran):
            specs, works = (SampleRow * len(part))(), [ran.plan.work[i] for i in part]
            for at, work in enumerate(works):
                specs[at] = self.program.states[work.row].spec  # a copy
                self._complete(specs[at], self.rows[work.row], masks.get(work.row))
            found = self._sampler.run(logits, specs)
            sampled |= {i: self._sampled(one, work.row) for i, work, one in zip(part, works, found, strict=True)}
        return sampled

    def _complete(self, target: SampleRow, row: Row, mask: bytes | None) -> None:
        """What differs from step to step. mask: has to live as long as the target is used."""
        fill_carry(target, row.spec, row.carry)
        target.ids, target.num_ids, target.position = row.ids.ctypes.data, row.known, row.known
        if mask is not None:
            words = np.frombuffer(mask, np.int32)
            target.mask, target.mask_words = words.ctypes.data, len(words)

    def _sampled(self, found: SampledRow, index: int) -> Sampled:
        row = self.rows[index]
        if found.error:
            return Sampled(-1, error=SAMPLE_ERRORS[found.error])
        entry = entry_of(found, row.spec.logprobs, self.info.vocab_size)
        return Sampled(found.token, entry, next_carry(found, row.spec, row.carry))

    def _logits_of(self, ends: dict[int, int], ran: Ran) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Works, and their rows of logits: neighbours in the buffer where the run left them, else computed again."""
        left, open_ = ran.left, list(ends)
        while open_:
            count = 1
            if left:
                open_.sort(key=left.__getitem__)
                first = left[open_[0]]
                while count < len(open_) and left[open_[count]] == first + count:
                    count += 1
                logits = torch.from_numpy(self.program.left_logits(first + count)[first:])
            else:
                count = min(len(open_), MAX_CHOSEN)
                logits = self._logits([ends[i] for i in open_[:count]])
            yield open_[:count], logits
            open_ = open_[count:]

    def _taken(self, work: Work, found: Sampled) -> RowResult:
        if found.error:
            return RowResult(work.row, error=found.error)
        row = self.rows[work.row]
        row.append(found.token)
        row.carry = found.carry
        entries = (found.logprob,) if found.logprob is not None else ()
        return RowResult(work.row, (found.token,), entries, carry=found.carry)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self.capacity.vocab_size, self.program.pool)

    def _logits(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(self.program.logits_of(rows))


def _flags(work: Work) -> int:
    sampling = (native.WORK_LOGITS if work.masked else native.WORK_SAMPLE) if work.sample else 0
    return sampling | native.WORK_BIDIRECTIONAL * work.indivisible
