"""What an operator does to a fleet while it serves: replace replicas, add some, take some away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvasir.engine.client import ASLEEP, ReplicaView, Sleeps
from kvasir.engine.rest import asleep
from kvasir.errors import EngineDead, InvalidRequest
from kvasir.fleet.members import TICK, Members
from kvasir.fleet.replica import Replica
from kvasir.fleet.totals import view_of

log = logging.getLogger("kvasir.fleet")

LONGEST_PAUSE = 30.0  # seconds between two attempts to start a replica


class Operations(Members):
    """One operation runs at a time; later ones wait for it. least: replicas that there may be."""

    least: int

    @property
    def views(self) -> tuple[ReplicaView, ...]:
        """What is known of each replica, in the order of their numbers."""
        return view_of(self.replicas)

    async def restart_replica(self, index: int, grace: float = 0.0) -> None:
        """Replaces a replica by a new one. It takes no more requests, and has `grace` seconds for those that it has;
        then they go on elsewhere. Returns when the new one takes requests. Raises InvalidRequest if there is no such
        replica, KvasirError if the new one cannot start: that is then tried again and again in the background."""
        await self._operate(lambda: self._replace(self._replica(index), grace))

    async def restart_all(self, grace: float = 0.0) -> None:
        """Replaces one replica after another. Raises KvasirError if a new one cannot start; the rest is left alone."""
        await self._operate(lambda: self._replace_all(grace))

    async def scale(self, count: int, grace: float = 0.0) -> None:
        """Starts or takes away replicas until there are `count`. Raises InvalidRequest if there may not be as many,
        KvasirError if one cannot start."""
        if not self.least <= count <= self.most:
            bounds = f"expected {self.least} to {self.most} (--max-replicas)"
            raise InvalidRequest(f"{count} replicas", bounds, "replicas")
        await self._operate(lambda: self._scale(count, grace))

    async def _operate(self, work: Callable[[], Coroutine[Any, Any, None]], asleep_too: bool = False) -> None:
        """Does what an operator asks for, after what was asked before; the end of the fleet ends it. Raises EngineDead
        in that case, and if the fleet is asleep, unless that is no obstacle (`asleep_too`)."""

        async def alone() -> None:
            async with self._operating:
                if self._dead is not None:
                    raise EngineDead(self._dead)
                if self.sleeping and not asleep_too:
                    raise asleep()
                await work()

        task = self._begin(alone())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # the caller left; the operation goes on
            raise EngineDead(self._dead or "the fleet ends") from None

    async def sleep(self, drain: float = 0.0) -> None:
        """All replicas; see `Sleeps`. Raises EngineDead or InvalidRequest if one cannot; then the others wake up."""
        await self._operate(lambda: self._sleep(drain), asleep_too=True)

    async def wake_up(self) -> None:
        """All replicas; returns when all take requests. See `Sleeps`."""
        await self._operate(self._wake_up, asleep_too=True)

    async def _sleep(self, drain: float) -> None:
        if self.sleeping:
            return
        if not self.replicas:
            raise EngineDead("no replica runs", "a request starts one")
        if wrong := [str(r.index) for r in self.replicas if not isinstance(r.engine, Sleeps)]:
            raise InvalidRequest(f"replica {', '.join(wrong)} cannot sleep", "restart it instead")
        self._falling_asleep = True
        try:
            self._wake()  # requests that wait for a replica end
            calls = (r.engine.sleep(drain) for r in self.replicas if isinstance(r.engine, Sleeps))
            for error in await asyncio.gather(*calls, return_exceptions=True):
                if error is not None:
                    await self._wake_replicas()
                    raise error
            while not all(r.engine.state.status in (ASLEEP, "ended") for r in self.replicas):
                await asyncio.sleep(TICK)
        finally:
            self._falling_asleep = False

    async def _wake_up(self) -> None:
        if self.sleeping:
            await self._wake_replicas()
            while any(not (r.takes or r.refused or r.engine.ended) for r in self.replicas):
                await asyncio.sleep(TICK)

    async def _wake_replicas(self) -> None:
        """Raises KvasirError if one cannot start."""
        calls = (r.engine.wake_up() for r in self.replicas if isinstance(r.engine, Sleeps))
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if error is not None:
                raise error

    async def _replace_all(self, grace: float) -> None:
        for replica in list(self.replicas):
            await self._replace(replica, grace)

    async def _scale(self, count: int, grace: float) -> None:
        while len(self.replicas) > count:
            last = self.replicas[-1]
            await self._retire(last, grace)
            self.replicas.remove(last)
            self._gone[last.index] = last
        free = sorted(set(range(self.most)) - {r.index for r in self.replicas})
        added = [self._add(index) for index in free[: max(0, count - len(self.replicas))]]
        for error in await asyncio.gather(*added, return_exceptions=True):
            if error is not None:
                raise error

    async def _add(self, index: int) -> None:
        """Starts a replica more. It counts on where the last one with its number ended. Raises KvasirError."""
        before = self._gone.pop(index, None)
        replica = Replica(index, self._make(index))
        replica.coming = True
        if before:
            replica.counts, replica.totals, replica.restarts = before.counts, before.totals, before.restarts
        self.replicas.append(replica)
        self.replicas.sort(key=lambda r: r.index)
        try:
            await self._start(replica)
        except Exception:
            self.replicas.remove(replica)
            if before:
                self._gone[index] = before
            raise
        replica.coming = False

    def _replica(self, index: int) -> Replica:
        found = next((r for r in self.replicas if r.index == index), None)
        if found is None:
            known = ", ".join(str(r.index) for r in self.replicas)
            raise InvalidRequest(f"there is no replica {index}", f"expected one of {known}", "index")
        return found

    async def _replace(self, replica: Replica, grace: float) -> None:
        await self._retire(replica, grace)
        new = Replica(replica.index, self._make(replica.index))
        new.counts, new.totals, new.restarts = replica.counts, replica.totals, replica.restarts + 1
        self.replicas[self.replicas.index(replica)] = new
        try:
            await self._start(new)
        except Exception as error:
            log.error("replica %d does not start: %s", new.index, error)
            self._begin(self._start_again(new))
            raise

    async def _retire(self, replica: Replica, grace: float) -> None:
        """Ends a replica; its requests go on elsewhere."""
        replica.draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        while replica.open and replica.answers and loop.time() < deadline:
            await asyncio.sleep(TICK)
        await self._move_all(replica)
        if replica.answers:
            await self._hear(replica)
        replica.totals.add(replica.stats)
        replica.totals.end()
        await replica.engine.stop()

    async def _start(self, replica: Replica) -> None:
        """Returns when the replica takes requests. Raises KvasirError."""
        await replica.engine.start()
        await self._welcome(replica)
        if wrong := replica.refused:
            await replica.engine.stop()
            raise EngineDead(f"the new replica takes no requests: {wrong}")

    async def _start_again(self, replica: Replica) -> None:
        """Tries to start a replica until it takes requests or is replaced, whatever the reason that it did not."""
        pause = 1.0
        while replica in self.replicas:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            async with self._operating:
                if replica not in self.replicas:
                    return
                replica.engine = self._make(replica.index)
                try:
                    return await self._start(replica)
                except Exception as error:
                    log.error("replica %d does not start: %s", replica.index, error)
