"""The members of a fleet: which replicas there are, from their start to their end, and what is known of each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import fields, replace
from typing import Any

from kvasir.engine.client import ASLEEP, Engine, EngineState, Launches, ShowsCache
from kvasir.errors import ConfigError, EngineDead
from kvasir.fleet.adapters import FleetAdapters
from kvasir.fleet.replica import Replica, ReplicaStatus, Routed
from kvasir.kv.changes import CacheChanges
from kvasir.types import ModelInfo

log = logging.getLogger("kvasir.fleet")

TICK = 0.02  # seconds between two looks at the replicas' states
REPORT = 0.5  # seconds between two reports of a replica
ASK_SECONDS = 2.0  # timeout of a question to a replica
# Facts of a model in which replicas may differ.
OWN = frozenset(("max_model_len", "adapter_bytes", "targets", "role", "engine_id", "transfers_at"))


class Members:
    """Owns the replicas. make(index): an engine that is not started."""

    def __init__(self, make: Callable[[int], Engine], count: int, most: int | None = None):
        self.most = most or count
        if not 1 <= count <= self.most:
            raise ConfigError(f"{count} replicas", f"expected 1 to {self.most}")
        self._make = make
        self.replicas = [Replica(i, make(i)) for i in range(count)]
        self._open: dict[str, Routed] = {}  # the fleet's journal, in order of arrival
        self._adapters = FleetAdapters(lambda: [r.engine for r in self.replicas if r.answers])
        self._info: ModelInfo | None = None
        self._dead: str | None = "the fleet has not been started"
        self._falling_asleep = False
        self._tasks: set[asyncio.Task] = set()
        self._operating = asyncio.Lock()
        self._gone: dict[int, Replica] = {}  # replicas that were taken away, by index
        self._summary: tuple[str, ...] = ()

    @property
    def info(self) -> ModelInfo:
        assert self._info is not None, "start() first"
        return self._info

    @property
    def summary(self) -> tuple[str, ...]:
        return self._summary

    def _described(self) -> tuple[str, ...]:
        lines = self.replicas[0].engine.summary
        prompts = sum(r.engine.info.role == "prefill" for r in self.replicas)
        what = f", {prompts} of them for prompts" if prompts else " as this one"
        count = "1 replica" if len(self.replicas) == 1 else f"{len(self.replicas)} replicas"
        return (*lines, f"fleet     {count}{what}") if lines else ()

    @property
    def ended(self) -> bool:
        return self._dead is not None and self._info is not None

    @property
    def sleeping(self) -> bool:
        """Whether it was put to sleep: by this server, or all its replicas by another one."""
        there = [replica.engine.state.status for replica in self.replicas]
        return self._falling_asleep or (bool(there) and set(there) == {ASLEEP})

    @property
    def state(self) -> EngineState:
        """ "ok" while a replica is ready; else the state of the one that is likely to be ready first."""
        if self.ended:
            return EngineState("ended", self._dead or "")
        if self.sleeping:
            return EngineState(ASLEEP)
        states = [r.engine.state for r in self.replicas]
        if any(r.takes for r in self.replicas):
            return EngineState()
        away = [s for s in states if s.status != "ended"]
        return min(away or states, key=lambda s: s.next_attempt or 0.0, default=EngineState("starting"))

    # -- from start to end -------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Starts the processes of the replicas; `start` waits for them. Call `abandon` if `start` is not reached."""
        for replica in self.replicas:
            if isinstance(replica.engine, Launches):
                replica.engine.launch()

    def abandon(self) -> None:
        """Ends processes that were launched and not started."""
        for replica in self.replicas:
            if isinstance(replica.engine, Launches):
                replica.engine.abandon()

    async def start(self) -> None:
        starts = [asyncio.ensure_future(r.engine.start()) for r in self.replicas]
        try:
            await asyncio.gather(*starts)
            self._info = self._common([r.engine.info for r in self.replicas])
        except BaseException:
            for start in starts:
                start.cancel()
            results = await asyncio.gather(*starts, return_exceptions=True)
            ready = [r for r, result in zip(self.replicas, results, strict=True) if result is None]
            await asyncio.gather(*(r.engine.stop() for r in ready))
            raise
        self._dead, self._summary = None, self._described()
        for replica in self.replicas:
            self._follow_cache(replica)
            replica.welcome = True
        self._begin(self._watch())

    def _common(self, infos: Sequence[ModelInfo]) -> ModelInfo:
        """The facts that all replicas share. Raises ConfigError if they differ."""
        for info in infos[1:]:
            if wrong := difference(infos[0], info):
                raise ConfigError(f"the replicas differ in {wrong}", "start them with the same model and options")
        return replace(infos[0], max_model_len=min(info.max_model_len for info in infos))

    async def stop(self, drain: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain
        while self._open and self._dead is None and loop.time() < deadline:
            await asyncio.sleep(TICK)
        self._dead = "the fleet has been stopped"
        for entry in self._open.values():
            entry.changed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(r.engine.stop() for r in self.replicas))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs work in the background; it ends with the fleet."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- what is known of replicas -----------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follows the replicas' states, and has each report now and then."""
        due = 0.0
        while True:
            for replica in self.replicas:
                self._follow(replica)
            if time.monotonic() >= due:
                for replica in self.replicas:
                    if replica.answers and not replica.asked:
                        self._begin(self._hear(replica))
                due = time.monotonic() + REPORT
            await asyncio.sleep(TICK)

    def _follow(self, replica: Replica) -> None:
        """Notes what has changed in a replica since the last look."""
        if not replica.answers and (replica.welcome or replica.refused):
            replica.welcome, replica.refused = False, ""
            replica.restarts += not (replica.draining or replica.engine.state.status == ASLEEP)
            replica.map.forget()
        if replica.answers and not replica.welcome and not replica.refused and not replica.welcoming:
            self._begin(self._welcome(replica))
        if (status := replica.status) is not replica.seen:
            log.info("replica %d is %s", replica.index, status)
            replica.seen = status
            if status is ReplicaStatus.READY:
                self._wake()

    def _wake(self) -> None:
        """Lets requests that wait for a replica look again, in the order of their arrival."""
        for entry in self._open.values():
            entry.changed.set()

    async def _welcome(self, replica: Replica) -> None:
        """Lets a replica that answers take requests, if it equals the others."""
        replica.welcoming = True
        try:
            if wrong := difference(self.info, replica.engine.info):
                replica.refused = f"its {wrong} differs from that of the fleet"
                log.error("replica %d takes no requests: %s", replica.index, replica.refused)
                return
            await self._adapters.share(replica.engine)
            self._follow_cache(replica)
            replica.welcome = True
            self._follow(replica)
        except EngineDead as error:
            log.warning("replica %d: %s", replica.index, error)
        finally:
            replica.welcoming = False

    def _follow_cache(self, replica: Replica) -> None:
        """Keeps the map of a replica's prefix cache, if its engine shows it."""
        engine = replica.engine
        if not isinstance(engine, ShowsCache):
            return

        def take(changes: CacheChanges) -> None:
            known = replica.map.block_size
            if replica.engine is engine and not replica.map.take(changes) and known:
                engine.follow_cache(take)  # changes are missing: another snapshot

        engine.follow_cache(take)

    async def _hear(self, replica: Replica) -> None:
        """Asks a replica for its statistics, and notes whether it answers."""
        replica.asked = True
        try:
            replica.reported(await asyncio.wait_for(replica.engine.stats(), ASK_SECONDS))
            replica.silent = False
        except EngineDead:
            pass
        except TimeoutError:
            replica.silent = not await replica.engine.alive(TICK)
            if replica.silent and any(r.takes for r in self.replicas):
                await self._move_all(replica)
        finally:
            replica.asked = False

    # -- moving ------------------------------------------------------------------------------------------------

    async def _move_all(self, replica: Replica) -> None:
        """Lets all requests of a replica go on elsewhere. Those whose clients do not read go once they do."""
        for entry in list(replica.open.values()):
            if not entry.moving:
                entry.moving = True
                await replica.engine.abort(entry.sent_id)


def difference(a: ModelInfo, b: ModelInfo) -> str:
    """The first fact in which replicas must agree and do not, or ""."""
    names = (f.name for f in fields(ModelInfo) if f.name not in OWN)
    return next((name for name in names if getattr(a, name) != getattr(b, name)), "")
