"""A replica of a fleet: an engine, what was routed to it, and whether it takes more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvasir.engine.client import Engine
from kvasir.engine.cumulative_stats import CumulativeStats
from kvasir.engine.journal import JournalEntry
from kvasir.fleet.cost import ReplicaFacts
from kvasir.fleet.prefix_map import PrefixMap, keys_of
from kvasir.sched.budget import StepTime
from kvasir.statistics import EngineStats
from kvasir.types import Delta, Note, Transfer


class ReplicaStatus(StrEnum):
    """ready: takes requests. starting: not known to the fleet yet, or on its way back after a death. trying: it tries
    requests apart that may have killed it. silent: its process does not answer. draining: takes no more requests.
    refused: it differs from the others. ended: it was stopped or has died for good."""

    READY = "ready"
    STARTING = "starting"
    TRYING = "trying"
    SILENT = "silent"
    DRAINING = "draining"
    REFUSED = "refused"
    ENDED = "ended"


@dataclass(slots=True)
class Routed(JournalEntry):
    """An open request of the fleet. replica: where it is; None while no replica takes it. uncached: prompt tokens that
    the replica is expected to compute, 0 once a token came. predicted: prompt tokens expected in its cache. moving: it
    is leaving its replica for another. rows, held, promised: its choices, tokens and new blocks, as the replica counts
    them. keys: hashes of its blocks, by tokens and block size. aborted: choices that are not wanted any more. full:
    replicas whose queues are full. changed: set when it may have a place, or is aborted. transfer: of its prompt's
    blocks to `target`, which is to continue it. answered: its first token came. sent_id: its id at the replica, another
    one each time: a replica that it left, and comes back to, may still send tokens for the id that it had before.
    notes: for its next delta, if it is traced. visits: replicas that it was sent to."""

    replica: Replica | None = None
    uncached: int = 0
    predicted: int = 0
    moving: bool = False
    rows: int = 0
    held: int = 0
    promised: list[bytes] = field(default_factory=list)
    keys: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    full: set[int] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    transfer: Transfer | None = None
    target: Replica | None = None
    answered: bool = False
    sent_id: str = ""
    notes: list[Note] = field(default_factory=list)
    visits: int = 0

    def note(self, name: str, **facts: int | float | str) -> None:
        """Adds what has just happened to it to its trace."""
        if self.request.trace:
            now = time.time()
            self.notes.append(Note(name, now, now, facts))

    @property
    def tokens(self) -> int:
        """Of the prompt, with what has been streamed of the longest choice."""
        return len(self.request.prompt_ids) + max(map(len, self.streamed.values()), default=0)

    def keys_for(self, block_size: int) -> list[bytes]:
        """The hashes of its blocks."""
        place = self.tokens, block_size
        if place not in self.keys:
            ids = (*self.request.prompt_ids, *max(self.streamed.values(), key=len, default=()))
            self.keys = {place: keys_of(self.request, ids, block_size)}
        return self.keys[place]


@dataclass(slots=True)
class ReplicaCounts:
    """routed: requests sent to it. lost: requests that left it when it died. moved: that were moved away from it.
    predicted, hit: prompt tokens expected in its prefix cache, and found there."""

    routed: int = 0
    lost: int = 0
    moved: int = 0
    predicted: int = 0
    hit: int = 0


class Replica:
    """index: its place in the fleet. welcome: it was found equal to the others and has their adapters. coming: it was
    added and its first start is under way."""

    def __init__(self, index: int, engine: Engine):
        self.index = index
        self.engine = engine
        self.welcome = self.welcoming = self.coming = False
        self.seen: ReplicaStatus | None = None  # at the last look
        self.asked = False  # for a report that has not come yet
        self.draining = False
        self.silent = False
        self.refused = ""
        self.open: dict[str, Routed] = {}
        self.rows = self.held = self.pending = 0  # choices, tokens and uncomputed prompt tokens of the open requests
        self.map = PrefixMap()
        self.counts = ReplicaCounts()
        self.totals = CumulativeStats()
        self.stats = EngineStats()  # as last reported
        self.others = 0  # prompt tokens that were waiting in it at the last report and are not the fleet's
        self.restarts = 0

    @property
    def status(self) -> ReplicaStatus:
        state = self.engine.state
        if state.status == "ended":
            return ReplicaStatus.ENDED
        if self.refused:
            return ReplicaStatus.REFUSED
        if self.draining:
            return ReplicaStatus.DRAINING
        if state.status != "ok" or not self.welcome:
            return ReplicaStatus.STARTING
        if self.silent:
            return ReplicaStatus.SILENT
        return ReplicaStatus.TRYING if state.trying else ReplicaStatus.READY

    @property
    def answers(self) -> bool:
        """Whether its engine takes questions, as far as it is known."""
        return self.engine.state.status == "ok"

    @property
    def takes(self) -> bool:
        """Whether requests may go there."""
        return self.status is ReplicaStatus.READY

    @property
    def backlog(self) -> int:
        """Prompt tokens that it was sent and has not computed."""
        return self.others + self.pending

    @property
    def model(self) -> StepTime:
        """The times of its steps, as last reported."""
        s = self.stats
        return StepTime((s.prefill_token_seconds, s.decode_row_seconds, s.key_seconds, s.step_overhead_seconds))

    def facts(self, model: StepTime, tpot: float, cached: int = 0) -> ReplicaFacts:
        """What a policy knows of it. model: the times of its steps, or those of others. tpot: of the request's class.
        cached: tokens of the request's prompt."""
        return ReplicaFacts(cached, len(self.open), self.backlog, self.rows, self.held, model, tpot)

    def predicted(self, entry: Routed) -> int:
        """Leading tokens of a request that are expected in the prefix cache."""
        size = self.map.block_size
        return size and size * self.map.cached(entry.keys_for(size))

    def enter(self, entry: Routed, predicted: int) -> None:
        """Counts a request that goes there. predicted: tokens of its prompt expected in the prefix cache."""
        entry.replica, entry.predicted = self, predicted
        entry.uncached = max(0, entry.tokens - entry.predicted)
        entry.rows, entry.held = len(entry.open), entry.tokens
        if size := self.map.block_size:
            entry.promised = entry.keys_for(size)[entry.predicted // size :]
        self.map.promise(entry.promised)
        self.open[entry.request.id] = entry
        self.counts.routed += 1
        self._count(entry, 1)

    def leave(self, entry: Routed) -> None:
        """Counts a request out."""
        self._count(entry, -1)
        self._settle(entry)
        entry.replica, entry.uncached, entry.moving = None, 0, False
        self.open.pop(entry.request.id, None)

    def _count(self, entry: Routed, sign: int) -> None:
        self.rows += sign * entry.rows
        self.held += sign * entry.held
        self.pending += sign * entry.uncached

    def saw(self, entry: Routed, delta: Delta) -> None:
        """Counts a delta of a request. The first one says what the prefix cache had."""
        tokens, ends = len(delta.token_ids), delta.finish_reason is not None
        entry.rows -= ends
        entry.held += tokens
        self.rows -= ends
        self.held += tokens
        if entry.uncached or entry.predicted:
            self.pending -= entry.uncached
            self.counts.predicted += min(entry.predicted, len(entry.request.prompt_ids))  # as hits are counted
            self.counts.hit += delta.cached_tokens
            entry.uncached = entry.predicted = 0
            self._settle(entry)

    def _settle(self, entry: Routed) -> None:
        """The cache itself reports the blocks of a request from now on."""
        self.map.promise(entry.promised, -1)
        entry.promised = []

    def reported(self, stats: EngineStats) -> None:
        """Takes the engine's statistics."""
        self.stats = stats
        self.others = max(0, stats.backlog_tokens - self.pending)


def measured(replicas: Sequence[Replica]) -> list[StepTime]:
    """The times of each replica's steps; those that nothing was measured of get the mean of the others."""
    models = [r.model for r in replicas]
    known = [m.costs for m in models if any(m.costs)]
    if not known:
        return models
    prefill, row, key, step = (sum(column) / len(known) for column in zip(*known, strict=True))
    return [m if any(m.costs) else StepTime((prefill, row, key, step)) for m in models]
