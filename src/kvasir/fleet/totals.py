"""The statistics and snapshots of a fleet, from those of its replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, zip_longest

from kvasir.engine.client import ReplicaView
from kvasir.engine.cumulative_stats import ended, total
from kvasir.fleet.cost import ReplicaFacts, first_seconds
from kvasir.fleet.replica import Replica, measured
from kvasir.replica_statistics import ReplicaStats
from kvasir.snapshot import BlockMap, Snapshot
from kvasir.statistics import EngineStats

MOST_ANSWERS = 256  # of a snapshot
MOST_STEPS = 256
FIRST_ROW = 3  # owners of blocks below it are no rows; see snapshot.BlockMap
TPOT = 0.1  # seconds per token that the backlog's prediction assumes as the target
MEANS = ("prefill_token_seconds", "decode_row_seconds", "key_seconds", "step_overhead_seconds", "chunk_tokens")


def stats_of(replicas: Sequence[Replica], gone: Iterable[Replica], adapters: int) -> EngineStats:
    """The sum of the replicas' statistics as last reported, and some of each. Gauges of replicas that are away are 0.
    gone: replicas that were taken away, whose counters still count. adapters: how many names the fleet has."""
    found = [r.totals.add(r.stats if r.answers else ended(r.stats)) for r in replicas]
    found += [r.totals.add(EngineStats()) for r in gone]
    whole: EngineStats = reduce(lambda a, b: total(a, b, gauges=True), found)
    there = [r.stats for r in replicas if r.answers]
    means = {name: sum(getattr(s, name) for s in there) / max(1, len(there)) for name in MEANS}
    means["chunk_tokens"] = int(means["chunk_tokens"])
    models = measured(replicas)
    return replace(
        whole,
        **means,
        pid=0,
        block_size=max((s.block_size for s in there), default=0),
        adapters_registered=adapters,
        replicas={str(r.index): _of(r, r.facts(m, TPOT)) for r, m in zip(replicas, models, strict=True)},
    )


def _of(replica: Replica, facts: ReplicaFacts) -> ReplicaStats:
    counts = replica.counts
    return ReplicaStats(
        ready=int(replica.takes),
        open_answers=replica.rows,
        backlog_seconds=_backlog(replica, facts),
        routed=counts.routed,
        lost=counts.lost,
        moved=counts.moved,
        restarts=replica.restarts,
        predicted_tokens=counts.predicted,
        hit_tokens=counts.hit,
    )


def view_of(replicas: Sequence[Replica]) -> tuple[ReplicaView, ...]:
    """What is known of each replica."""
    return tuple(_view(r, r.facts(m, TPOT)) for r, m in zip(replicas, measured(replicas), strict=True))


def _view(replica: Replica, facts: ReplicaFacts) -> ReplicaView:
    counts, stats = replica.counts, replica.stats if replica.answers else ended(replica.stats)
    return ReplicaView(
        index=replica.index,
        status=replica.status,
        reason=replica.refused or replica.engine.state.reason,
        open=replica.rows,
        backlog=_backlog(replica, facts),
        routed=counts.routed,
        lost=counts.lost,
        moved=counts.moved,
        predicted=counts.predicted,
        hit=counts.hit,
        restarts=replica.restarts,
        pid=stats.pid,
        blocks_used=stats.blocks_used,
        blocks_total=stats.blocks_total,
        blocks_cached=stats.blocks_cached,
        role=replica.engine.info.role if replica.welcome else "",  # a replica that starts does not say it yet
        running=stats.running,
        waiting=stats.waiting,
        generated_tokens=replica.totals.add(stats).generated_tokens,
    )


def _backlog(replica: Replica, facts: ReplicaFacts) -> float:
    """Predicted seconds until it has computed the prompts that it was sent."""
    return first_seconds(facts, 0) if replica.answers and facts.backlog else 0.0


def look_of(snapshots: Sequence[Snapshot], stats: EngineStats) -> Snapshot:
    """One snapshot of all replicas: their sequences and blocks one after another, with rows that are distinct; the last
    steps in turn."""
    firsts = [sum(s.rows for s in snapshots[:i]) for i in range(len(snapshots))]
    answers = [
        replace(answer, row=answer.row + first if answer.row >= 0 else answer.row)
        for snapshot, first in zip(snapshots, firsts, strict=True)
        for answer in snapshot.answers
    ]
    answers.sort(key=lambda answer: answer.row < 0)
    steps = [step for turn in zip_longest(*(reversed(s.steps) for s in snapshots)) for step in turn if step]
    kinds = zip(*(s.groups for s in snapshots), strict=True)
    return Snapshot(
        now=max(s.now for s in snapshots),
        stats=stats,
        answers=tuple(answers[:MOST_ANSWERS]),
        groups=tuple(_joined(maps, firsts) for maps in kinds),
        steps=tuple(reversed(steps[:MOST_STEPS])),
        rows=sum(s.rows for s in snapshots),
    )


def _joined(maps: Sequence[BlockMap], firsts: Sequence[int]) -> BlockMap:
    """The maps of one cache group, one after another. A cell stands for as many blocks in each, or nearly."""
    runs = (_shifted(of.runs, first) for of, first in zip(maps, firsts, strict=True))
    return replace(
        maps[0],
        total=sum(of.total for of in maps),
        per_cell=max(of.per_cell for of in maps),
        runs=tuple(chain.from_iterable(runs)),
    )


def _shifted(runs: tuple[int, ...], first: int) -> list[int]:
    """Run lengths with the rows of a replica whose rows begin at `first`."""
    found = list(runs)
    for i in range(0, len(found), 2):
        if found[i] >= 2 * FIRST_ROW:
            found[i] += 2 * first
    return found
