"""Takes a snapshot of an engine: reads the scheduler and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from kvasir.kv.map import block_cells, run_lengths, shrink
from kvasir.plan import StepPlan
from kvasir.sched.scheduler import Scheduler
from kvasir.sched.sequence import Sequence
from kvasir.snapshot import AnswerState, BlockMap, Snapshot, StepRecord
from kvasir.statistics import EngineStats

MOST_ANSWERS = 256
MOST_CELLS = 4096  # of a cache group's map
MOST_STEPS = 256


def record(plan: StepPlan, seconds: float) -> StepRecord:
    """The record of a completed step."""
    decodes = len(plan.decodes) + sum(work.count == 1 for work in plan.work)
    return StepRecord(plan.step, seconds, decodes, plan.num_tokens - decodes)


def look(scheduler: Scheduler, stats: EngineStats, steps: Iterable[StepRecord]) -> Snapshot:
    """A snapshot of at most MOST_ANSWERS sequences, with maps of at most MOST_CELLS cells."""
    now = scheduler.clock()
    living = islice(chain(scheduler.running, scheduler.waiting, scheduler.table.paused), MOST_ANSWERS)
    answers = tuple(_state(seq, now) for seq in living)
    return Snapshot(now, stats, answers, _maps(scheduler), tuple(steps), scheduler.capacity.max_rows)


def _state(seq: Sequence, now: float) -> AnswerState:
    request = seq.request
    return AnswerState(
        id=request.id,
        index=seq.index,
        tenant=request.tenant,
        slo=request.slo,
        row=seq.row,
        prompt=seq.prompt_len,
        known=seq.counts.known,
        computed=seq.counts.computed,
        cached=seq.cached,
        preemptions=seq.preemptions,
        age=now - seq.arrived,
    )


def _maps(scheduler: Scheduler) -> tuple[BlockMap, ...]:
    kv = scheduler.kv
    maps = []
    for g, (group, pool) in enumerate(zip(kv.groups, kv.pools, strict=True)):
        tables = ((seq.row, [b for b in seq.blocks.ids[g] if b]) for seq in scheduler.running)
        per_cell, cells = shrink(block_cells(pool.cached_flags, kv.tree.pinned(g), tables), MOST_CELLS)
        maps.append(BlockMap(group.kind.name, group.kind.bound, pool.total, per_cell, run_lengths(cells)))
    return tuple(maps)


def load_of(scheduler: Scheduler) -> dict[str, Any]:
    """The fields of EngineStats that tell a router how busy an engine is."""
    prefill, row, key, step = scheduler.service.step_time.costs
    waiting = (seq.counts.known - max(seq.counts.computed, seq.expected) for seq in scheduler.waiting)
    begun = (seq for seq in scheduler.running if seq.counts.computed < seq.prompt_len)
    return {
        "backlog_tokens": sum(waiting) + sum(seq.counts.known - seq.counts.computed for seq in begun),
        "prefill_token_seconds": prefill,
        "decode_row_seconds": row,
        "key_seconds": key,
        "step_overhead_seconds": step,
        "max_rows": scheduler.capacity.max_rows,
        "chunk_tokens": scheduler.capacity.max_tokens_per_step,
    }
