"""FleetEngine: several engines of one model as one engine. It chooses a replica for each request, and when a replica
dies, its streams continue on another with the same tokens.

An open request is an entry of the fleet's journal: the request and what its client was given so far. That is all that
another replica needs, because results are exact. A replica that dies ends its streams with EngineLost; the fleet sends
each request to another replica with the ids streamed so far. Only requests that may have killed two replicas stay with
the second one, whose own journal tries them apart once it is back (engine/journal.py). Draining moves streams in the
same way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

from kvasir.engine.client import Checks, Engine, Exchanges
from kvasir.engine.journal import SUSPECT_LIVES
from kvasir.engine.rest import asleep
from kvasir.errors import EngineDead, EngineLost, InvalidRequest, QueueFull
from kvasir.fleet import roles
from kvasir.fleet.autoscale import Limits
from kvasir.fleet.cost import ANSWER, choose
from kvasir.fleet.members import ASK_SECONDS
from kvasir.fleet.replica import Replica, Routed, measured
from kvasir.fleet.scaling import USUAL, Scaling
from kvasir.fleet.totals import look_of, stats_of
from kvasir.snapshot import Snapshot
from kvasir.statistics import EngineStats
from kvasir.types import AdapterInfo, Delta, FinishReason, Request

log = logging.getLogger("kvasir.fleet")

RESET_SECONDS = 30.0  # for a replica to reset its prefix cache: it does between two steps
MEETINGS = 3  # replicas over which servers exchange notes: one may be lost, and not all need hear of it


class FleetEngine(Scaling):
    """make(index): an engine that is not started; replicas that die must end their streams with EngineLost."""

    def __init__(
        self,
        make: Callable[[int], Engine],
        count: int,
        *,
        most: int | None = None,
        policy: str = "cost",
        max_waiting: int = 1024,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """policy: one of cost.POLICIES. most: replicas that there may be at once; None for `count`. max_waiting:
        choices that may wait while no replica takes requests. limits: see Scaling."""
        super().__init__(make, count, most, limits, clock)
        self._policy = policy
        self._max_waiting = max_waiting
        self._turn = 0  # requests routed so far
        self._numbers = itertools.count()  # of what is sent to replicas

    def exchange(self, note: bytes, take: Callable[[bytes], None]) -> None:
        """Over a few replicas that have a host, the same ones in all servers that reach them."""
        engines = (replica.engine for replica in self.replicas)
        hosted = {engine.meeting: engine for engine in engines if isinstance(engine, Exchanges) and engine.meeting}
        for meeting in sorted(hosted)[:MEETINGS]:
            hosted[meeting].exchange(note, take)

    @property
    def meeting(self) -> str:
        """None of its own."""
        return ""

    # -- requests ----------------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> AsyncIterator[Delta]:
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self.sleeping:
            raise asleep()
        request = self._adapters.names.resolve(request)
        if request.id in self._open:
            raise InvalidRequest(f"request id {request.id!r} is already in use", param="request_id")
        entry = Routed.of(request, self._clock())
        self._open[request.id] = entry
        try:
            while entry.open:
                replica = await self._place(entry)
                if replica is None:
                    for delta in self._ended(entry):
                        entry.take(delta)
                        yield delta
                    continue
                stream = self._on(replica, entry)
                async with aclosing(stream):
                    async for delta in stream:
                        yield delta
        finally:
            del self._open[request.id]
            self._busy = self._clock()

    async def _on(self, replica: Replica, entry: Routed) -> AsyncGenerator[Delta]:
        """The request's deltas from one replica, until its choices have ended or it must go elsewhere."""
        replica.enter(entry, self._predicted(replica, entry))
        entry.sent_id = f"{entry.request.id}/{next(self._numbers)}"
        entry.visits += 1
        facts = {"predicted_tokens": entry.predicted, "tokens": entry.tokens, "pid": replica.stats.pid}
        entry.note("replica", replica=replica.index, visit=entry.visits, **facts)
        try:
            request = roles.routed(replica, entry, entry.to_send(self._clock()), self.replicas)
            stream = replica.engine.submit(replace(request, id=entry.sent_id))
            async with aclosing(stream):  # type: ignore[type-var]
                async for delta in stream:
                    if entry.moving and delta.finish_reason is FinishReason.ABORT:
                        continue
                    delta = replace(delta, id=entry.request.id)
                    if delta.progress is not None:
                        yield delta
                        continue
                    if entry.notes:
                        delta = replace(delta, notes=(*entry.notes, *delta.notes))
                        entry.notes.clear()
                    entry.take(delta)
                    replica.saw(entry, delta)
                    if not entry.answered:
                        self._answered(entry)
                    if roles.hands_over(replica, entry, self.replicas):
                        entry.moving = True
                        entry.note("hand_over", replica=replica.index)
                        await replica.engine.abort(entry.sent_id)
                    yield delta
            replica.counts.moved += entry.moving
            if entry.moving:
                entry.note("moved", replica=replica.index)
            entry.returned |= entry.moving
        except EngineLost as error:
            replica.counts.lost += 1
            entry.note("lost", replica=replica.index, reason=str(error)[:200])
            entry.returned = True
            if error.lives is None:
                self._outlive(entry)
            else:
                entry.deaths, entry.lives = error.deaths or 0, error.lives
        except QueueFull:
            entry.full.add(replica.index)
            if all(other.index in entry.full for other in self.replicas if other.takes):
                raise
        except EngineDead:
            if not replica.engine.ended or self._dead:
                raise
            replica.counts.lost += 1
            entry.note("lost", replica=replica.index)
            entry.returned = True
            self._outlive(entry)
        finally:
            replica.leave(entry)

    def _outlive(self, entry: Routed) -> None:
        """Counts an engine that ended with a request, whoever is to blame. Raises EngineDead if there were too many."""
        entry.lives += 1
        if entry.lives >= SUSPECT_LIVES:
            raise EngineDead(f"{entry.lives} engines ended with this request", "it will not be retried")

    async def _place(self, entry: Routed) -> Replica | None:
        """The replica for a request, once one takes it; None if choices of it end before that. Raises EngineDead,
        QueueFull."""
        while True:
            if self._dead is not None:
                raise EngineDead(self._dead)
            if self.sleeping:
                raise asleep()
            now = self._clock()
            if entry.aborted.intersection(entry.open) or entry.is_overdue(now):
                return None
            entry.changed.clear()
            if replica := self._choose(entry):
                return replica
            self._refuse_beyond_bound(entry)
            self._missing.set()
            deadline = entry.request.deadline
            left = None if deadline is None else deadline - (now - entry.arrived)
            try:
                await asyncio.wait_for(entry.changed.wait(), left)
            except TimeoutError:
                return None

    def _refuse_beyond_bound(self, entry: Routed) -> None:
        """Raises QueueFull if too many choices wait for a replica, unless the request has been in one."""
        held = sum(len(e.open) for e in self._open.values() if e.replica is None and e is not entry)
        if held and not entry.returned and held + len(entry.open) > self._max_waiting:
            raise QueueFull("no replica takes requests at present and the queue is full", "try again later")

    def _ended(self, entry: Routed) -> list[Delta]:
        """The last deltas of choices that end while no replica computes them."""
        if gone := entry.aborted.intersection(entry.open):
            return entry.last(FinishReason.ABORT, sorted(gone))
        return entry.last(FinishReason.TIMEOUT, entry.open)

    # -- routing -----------------------------------------------------------------------------------------------

    def _choose(self, entry: Routed) -> Replica | None:
        """The replica that the policy chooses among those that take the request; None if there is none."""
        able = [r for r in self.replicas if r.takes and r.index not in entry.full]
        able = roles.able(able, entry)
        length = len(entry.request.prompt_ids) + (entry.request.params.max_tokens or 0)
        fitting = [r for r in able if length <= r.engine.info.max_model_len] or able
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        params, target = entry.request.params, self.info.targets.get(entry.request.slo, USUAL)
        facts = [
            replica.facts(model, target.tpot, self._predicted(replica, entry))
            for replica, model in zip(fitting, measured(fitting), strict=True)
        ]
        self._turn += 1
        answer = min(ANSWER, params.max_tokens or ANSWER)
        return fitting[choose(self._policy, facts, entry.tokens, self._turn, answer)]

    def _predicted(self, replica: Replica, entry: Routed) -> int:
        """Leading tokens of the request that the replica is expected to have in its prefix cache."""
        return max(replica.predicted(entry), roles.received(replica, entry))

    # -- the rest of the protocol ------------------------------------------------------------------------------

    async def abort(self, request_id: str, index: int | None = None) -> None:
        entry = self._open.get(request_id)
        if entry is None:
            return
        entry.aborted.update(entry.open if index is None else (index,))
        entry.changed.set()
        if entry.replica is not None and not entry.moving:
            await entry.replica.engine.abort(entry.sent_id, index)

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self._adapters.names.all

    async def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        return await self._adapters.load(name, path, replace, pinned)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(name)

    async def reset_prefix_cache(self) -> int:
        """Of all replicas. Raises EngineDead if one does not answer; the others have forgotten theirs then."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self.sleeping:
            raise asleep()
        asked = [r for r in self.replicas if not r.engine.ended]
        freed = await asyncio.gather(*map(self._reset, asked))
        if failed := [str(r.index) for r, blocks in zip(asked, freed, strict=True) if blocks is None]:
            what = f"the prefix cache may not be empty in replica {', '.join(failed)}, which does not answer"
            raise EngineDead(what, "try again later")
        return sum(blocks for blocks in freed if blocks)

    async def _reset(self, replica: Replica) -> int | None:
        """Resets the prefix cache of a replica; returns the blocks that became free, None if it does not answer."""
        try:
            return await asyncio.wait_for(replica.engine.reset_prefix_cache(), RESET_SECONDS)
        except (EngineDead, TimeoutError):
            return None

    async def stats(self) -> EngineStats:
        """Does not wait for replicas that are silent: theirs are those last reported."""
        await asyncio.gather(*map(self._hear, [] if self.asleep else self._answering()))
        return stats_of(self.replicas, self._gone.values(), len(self.adapters))

    async def look(self) -> Snapshot:
        asked = (asyncio.wait_for(r.engine.look(), ASK_SECONDS) for r in self._answering())
        results = await asyncio.gather(*asked, return_exceptions=True)
        found = [r for r in results if isinstance(r, Snapshot)]
        if not found:
            raise EngineDead("no replica answers", "try again later")
        return look_of(found, stats_of(self.replicas, self._gone.values(), len(self.adapters)))

    async def alive(self, timeout: float = 1.0) -> bool:
        if self.asleep:
            return True
        asked = [asyncio.ensure_future(r.engine.alive(timeout)) for r in self.replicas if r.takes]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
            return False
        finally:
            for task in asked:
                task.cancel()

    async def check(self) -> None:
        """Checks that nothing leaked in the replicas that answer. Raises AssertionError."""
        assert not self._open, f"{len(self._open)} requests are open"
        for replica in self.replicas:
            counts = (replica.rows, replica.held, replica.pending, len(replica.open))
            assert counts == (0, 0, 0, 0), f"replica {replica.index} still counts {counts}"
            if replica.answers and isinstance(replica.engine, Checks):
                await replica.engine.check()

    def _answering(self) -> list[Replica]:
        """Those that are not silent, or all. Raises EngineDead if there are none."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self.sleeping:
            raise asleep()
        if not (found := [r for r in self.replicas if r.answers]):
            hint = "a request starts one" if self.asleep else "try again later"
            raise EngineDead("no replica answers", hint)
        return [r for r in found if not r.silent] or found
