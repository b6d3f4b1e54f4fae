"""RayEngine: the engine of an actor, as a replica of a fleet. Ray starts an actor that died again, elsewhere if its
node is gone; its address is asked for each time that it is connected to."""

from __future__ import annotations

import ssl
from typing import Any

from kvasir.cli.cluster.ray_cluster import RayCluster
from kvasir.cli.cluster.spec import ReplicaSpec
from kvasir.engine.remote import HostAddress, RemoteEngine
from kvasir.errors import ConfigError, EngineDead, EngineLost
from kvasir.fleet.engine import FleetEngine

START_SECONDS = 60.0  # of attempts, while Ray has no actor that answers


class RayEngine(RemoteEngine):
    """Owns its actor: `launch` or `start` makes it, `stop` ends it, unless `leaves` is set."""

    def __init__(self, cluster: RayCluster, spec: ReplicaSpec, key: str, tls: ssl.SSLContext | None):
        name = spec.reach.name if spec.reach else ""
        super().__init__(HostAddress(), key, tls, patience=START_SECONDS, server_name=name)
        self._cluster = cluster
        self._spec = spec
        self._actor: Any = None
        self.leaves = False

    def launch(self) -> None:
        """Asks Ray for the actor."""
        self._actor = self._actor or self._cluster.place(self._spec)

    def abandon(self) -> None:
        """Ends an actor that was launched and not started."""
        if self._actor is not None and self._info is None:
            self._cluster.kill(self._actor)
            self._actor = None

    async def start(self) -> None:
        """Raises EngineDead, and ConfigError if the engine cannot start there."""
        self.launch()
        try:
            await super().start()
        except BaseException:
            self.abandon()
            raise

    async def stop(self, drain: float = 0.0) -> None:
        await super().stop(drain)
        if self._actor is not None and not self.leaves:
            await self._cluster.end(self._actor, self._spec)
        self._actor = None

    async def _find(self) -> HostAddress:
        if self._actor is None:
            raise EngineDead("the replica has been stopped")
        try:
            answer = await self._cluster.started(self._actor, self._spec)
        except EngineLost:
            self._actor = self._cluster.place(self._spec)
            raise
        if answer.error:
            raise ConfigError(f"replica {self._spec.index} of {self._spec.model}: {answer.error}", answer.hint)
        return HostAddress.parse(answer.address)


class ActorFleet(FleetEngine):
    """A fleet of actors. leaves: its actors outlive it, for the next server."""

    leaves = False

    async def stop(self, drain: float = 0.0) -> None:
        for replica in self.replicas:
            if isinstance(replica.engine, RayEngine):
                replica.engine.leaves = self.leaves
        await super().stop(drain)
