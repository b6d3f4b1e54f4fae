"""The Ray cluster of a fleet: the only user of Ray, besides its Serve application.

Actors of a cluster that this process started end with it. In a cluster that was there before, they are detached: they
outlive a server that dies, and the next one finds them by their names. Without a server they end after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir.cli.cluster.config import ClusterPlan, ModelPlan, RayPlace, Resources
from kvasir.cli.cluster.shown import needs
from kvasir.cli.cluster.spec import ReplicaSpec, Started, decode_started, encode
from kvasir.environment import prepare_ray
from kvasir.errors import ConfigError, EngineDead, EngineLost, quoted

log = logging.getLogger("kvasir.fleet")

OBJECTS = 80 << 20  # bytes of Ray's object store, which nothing here uses; near the least that Ray takes
CONNECTING = "start one with `ray start --head`, correct ray.address, or set RAY_AUTH_MODE=token if it asks for a token"
ATTEMPTS = 3  # to start a cluster: Ray gives its processes 30 s, too few on a busy machine
PLACE_SECONDS = 10.0  # without a node after which a log line says what an actor waits for
LISTEN_SECONDS = 10.0  # for a cluster to accept a connection
END_SECONDS = 10.0  # for an engine to end by itself


class RayCluster:
    """plan: of the fleet. Connects at once; raises ConfigError if Ray is not installed or cannot be reached, or if the
    replicas have no room in a cluster that is started here."""

    def __init__(self, plan: ClusterPlan):
        self._ray = _import_ray()
        self._owns = plan.ray.address is None
        self._spreads = plan.reach is not None
        if plan.ray.address not in (None, "auto"):
            check_listens(plan.ray.address)
        self._init(plan)
        if self._owns:
            try:
                check_room(plan.models, self._ray.cluster_resources())
            except ConfigError:
                self.close()
                raise

    def _init(self, plan: ClusterPlan) -> None:
        """Raises ConfigError."""
        for left in reversed(range(ATTEMPTS if self._owns else 1)):
            try:
                self._ray.init(**_arguments(plan.ray), namespace=f"kvasir/{plan.name}", logging_level=logging.WARNING)
                return
            except Exception as error:  # Ray raises bare ones, too
                self._ray.shutdown()
                if left:
                    continue
                where = f"the Ray cluster at {plan.ray.address}" if plan.ray.address else "a Ray cluster here"
                hint = "see Ray's logs" if self._owns else CONNECTING
                raise ConfigError(f"{where} cannot be used: {_first_line(error)}", hint) from None

    @property
    def nodes(self) -> list[str]:
        """The addresses of all nodes."""
        return sorted({node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]})

    def place(self, spec: ReplicaSpec) -> Any:
        """The replica's actor, new or found."""
        from kvasir.cli.cluster.actor import ReplicaActor

        where = "SPREAD" if self._spreads else self._here()
        named = {} if self._owns else {"name": spec.actor, "get_if_exists": True, "lifetime": "detached"}
        options = {
            **named,
            "max_restarts": -1,
            "max_concurrency": 100,
            "scheduling_strategy": where,
            **ray_options(spec.resources),
        }
        return self._ray.remote(ReplicaActor).options(**options).remote(encode(spec), self.nodes)

    def _here(self) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # type: ignore[import-not-found]

        return NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)

    async def started(self, actor: Any, spec: ReplicaSpec) -> Started:
        """Waits for the actor's place and its engine. Raises EngineDead if the actor is on its way back, EngineLost if
        it is gone for good, ConfigError if no node can have it."""
        placing = asyncio.ensure_future(_result(actor.pid.remote()))
        try:
            if not (await asyncio.wait({placing}, timeout=PLACE_SECONDS))[0]:
                what = needs(spec.resources)
                log.warning("replica %d of %s waits for a node with %s free", spec.index, spec.model, what)
            await placing
            return decode_started(await _result(actor.start.remote()))
        except self._ray.exceptions.ActorUnavailableError:
            raise EngineDead(f"Ray is starting the actor of replica {spec.index} again") from None
        except self._ray.exceptions.ActorUnschedulableError:
            message = f"replica {spec.index} of {spec.model} has no place: it needs {needs(spec.resources)}"
            raise ConfigError(message, "lower its resources, or add nodes that have them") from None
        except self._ray.exceptions.ActorDiedError as error:
            raise EngineLost(f"the actor of replica {spec.index} is gone: {_first_line(error)}") from None
        except self._ray.exceptions.RayError as error:
            raise EngineDead(f"the actor of replica {spec.index} does not answer: {_first_line(error)}") from None
        finally:
            placing.cancel()

    async def end(self, actor: Any, spec: ReplicaSpec) -> None:
        """Ends an actor and its engine for good. Returns when its name is free."""
        try:
            async with asyncio.timeout(END_SECONDS):
                await _result(actor.stop.remote())
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            log.warning("an actor did not end by itself: %s", _first_line(error))
        self.kill(actor)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                while not self._owns and spec.actor in self._ray.util.list_named_actors():
                    await asyncio.sleep(0.05)

    def kill(self, actor: Any) -> None:
        self._ray.kill(actor, no_restart=True)

    def keep_only(self, specs: list[ReplicaSpec]) -> None:
        """Ends the actors that an earlier server with other options left."""
        wanted = {spec.actor for spec in specs}
        for name in self._ray.util.list_named_actors():
            if name not in wanted:
                log.info("the actor %s is of an earlier server and ends", name)
                self.kill(self._ray.get_actor(name))

    def close(self) -> None:
        self._ray.shutdown()


def _import_ray() -> Any:
    prepare_ray()
    try:
        import ray  # type: ignore[import-not-found]
        import ray.util  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: {error}", "pip install 'kvasir-llm[fleet]'") from None
    return ray


def _arguments(place: RayPlace) -> dict[str, Any]:
    """Of ray.init."""
    if place.address is not None:
        return {"address": place.address}
    return {
        "address": "local",
        "num_cpus": place.num_cpus,
        "num_gpus": place.num_gpus,
        "include_dashboard": False,
        "object_store_memory": OBJECTS,
    }


def check_listens(address: str) -> None:
    """Raises ConfigError unless something listens at HOST:PORT: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTEN_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"there is no Ray cluster at {quoted(address)}: {error}", CONNECTING) from None


def check_room(models: Sequence[ModelPlan], there: Mapping[str, float]) -> None:
    """there: what the nodes have, by Ray's names. Raises ConfigError if the replicas of all models need more at the
    start."""
    needed: Counter[str] = Counter()
    for model in models:
        options = ray_options(model.resources)
        named = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": options.get("memory", 0)}
        for name, amount in {**named, **options["resources"]}.items():
            needed[name] += amount * model.fleet.count
    for name, amount in needed.items():
        if amount > (has := there.get(name, 0.0)) + 1e-6:
            what = f"all replicas together need {amount:g} {name}, and this machine has {has:g} for Ray"
            raise ConfigError(what, "lower `resources` of the models, or raise num_cpus or num_gpus of `ray`")


def ray_options(resources: Resources) -> dict[str, Any]:
    """What Ray reserves for an actor."""
    found: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "resources": resources.custom}
    return found | {"memory": memory} if (memory := resources.memory_bytes) else found


async def _result(ref: Any) -> Any:
    return await ref


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
