"""`kvasir fleet CONFIG`: the server of a fleet on Ray, an ordinary API process whose engines are actors."""

from __future__ import annotations

import atexit
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvasir.cli.api_workers import serve_by_workers
from kvasir.cli.cluster.config import ClusterPlan, ModelPlan, read_config, within
from kvasir.cli.cluster.engine import ActorFleet, RayEngine
from kvasir.cli.cluster.ray_cluster import RayCluster
from kvasir.cli.cluster.shown import shown
from kvasir.cli.cluster.spec import ReplicaSpec, spec_of
from kvasir.cli.cluster.supervised import end_with_input
from kvasir.cli.front_maker import FrontMaker
from kvasir.cli.opening import ShownStart
from kvasir.cli.replicas import client_context, read_secret
from kvasir.cli.resolve import resolve
from kvasir.config import EngineOptions
from kvasir.engine.load_text import load_text
from kvasir.engine.sockets import make_socket_path, remove_socket
from kvasir.serve.auth.keys import read_keys
from kvasir.serve.hosting.offers import GivenOffers, Offer
from kvasir.serve.settings import ServeSettings
from kvasir.store.facts import read_details
from kvasir.weights.find import find_model


def run(path: Path, check_only: bool, ray_address: str | None, supervised: bool, verbose: bool = False) -> None:
    """Serves until SIGTERM or SIGINT, or shows what would be served. ray_address: instead of the file's. supervised:
    the end of the standard input is a signal, too. Raises KvasirError."""
    plan = read_config(path)
    if ray_address:
        plan = replace(plan, ray=type(plan.ray)(ray_address))
    if check_only:
        within(f"{path}: server", settings_of, _without_absent_keys(plan))
        return print("\n".join(shown(plan)))
    settings = within(f"{path}: server", settings_of, plan)
    for index, model in enumerate(plan.models):
        within(f"{path}: models[{index}]", resolve, model.served)  # before Ray is started
    if supervised:
        end_with_input()
    cluster = RayCluster(plan)
    try:
        maker = ClusterMaker(plan, cluster, leaves=supervised, verbose=verbose)
        cluster.keep_only(maker.specs())
        _serve(maker, plan, settings)
    finally:
        cluster.close()


def settings_of(plan: ClusterPlan) -> ServeSettings:
    """Raises ConfigError for options of the server that exclude each other."""
    server = plan.server
    return ServeSettings(
        host=server.host,
        port=server.port,
        model_names=(plan.models[0].name,) if len(plan.models) == 1 else (),
        api_keys=tuple(server.api_key or ()),
        keys=read_keys(server.keys) if server.keys else (),
        keys_file=server.keys,
        allowed_hosts=tuple(server.allowed_host or ()),
        allowed_origins=tuple(server.allowed_origin or ()),
        drain=server.drain,
        **server.operation.settings(),
    )


def _without_absent_keys(plan: ClusterPlan) -> ClusterPlan:
    """The plan for a check on another machine than the server's: without a file of keys that is not here."""
    if plan.server.keys is None or plan.server.keys.exists():
        return plan
    return replace(plan, server=replace(plan.server, keys=None, host="127.0.0.1"))


class ClusterMaker(FrontMaker):
    """The fronts of the models, whose engines are fleets of actors. leaves: these outlive this process."""

    def __init__(self, plan: ClusterPlan, cluster: RayCluster, leaves: bool, verbose: bool = False):
        server = plan.server
        timeout = server.operation.engine_timeout
        super().__init__(server.seed, server.tool_format, server.reasoning_format, timeout, verbose=verbose)
        self._plan, self._cluster, self._leaves = plan, cluster, leaves
        self._key = read_secret(plan.reach.key) if plan.reach else ""
        self._tls: ssl.SSLContext | None = client_context(plan.reach.ca) if plan.reach else None
        self._makers = {model.name: self._specs_of(model) for model in plan.models}

    def specs(self) -> list[ReplicaSpec]:
        """Of all replicas that there may be."""
        return [self._makers[m.name](index) for m in self._plan.models for index in range(m.fleet.most)]

    def engine(self, options: EngineOptions, **more: Any) -> ActorFleet:
        model = self._plan.of(options)
        spec, fleet = self._makers[model.name], model.fleet

        def make(index: int) -> RayEngine:
            return RayEngine(self._cluster, spec(index), self._key, self._tls)

        given = {"policy": fleet.router_policy, "max_waiting": options.max_waiting, "limits": fleet.limits}
        found = ActorFleet(make, fleet.count, most=fleet.most, **given)
        found.leaves = self._leaves
        return found

    def _specs_of(self, model: ModelPlan) -> Callable[[int], ReplicaSpec]:
        """Replicas of a model. On one node those with roles exchange blocks over sockets that this process names."""
        count = 0 if self._plan.reach else model.fleet.decode_replicas or 0
        sockets = [make_socket_path() for _ in range(count)]
        for path in sockets:
            atexit.register(remove_socket, path)
        texts = [str(path) for path in sockets]
        return lambda index: spec_of(self._plan, model, index, self.engine_timeout, texts)


def _serve(make: ClusterMaker, plan: ClusterPlan, settings: ServeSettings) -> None:
    operation = plan.server.operation
    given = [model.served for model in plan.models]
    if len(given) > 1:
        return _serve_several(make, given, settings)
    options, entry = resolve(given[0])
    if operation.api_workers > 1:
        return serve_by_workers(make, options, settings, entry, operation.api_workers)
    with ShownStart(settings.model_names[0], make.verbose) as started:
        engine = make.launched(options)
        try:
            from kvasir.serve.hosting.catalogue import OneModel
            from kvasir.serve.server import run as run_server

            run_server(OneModel(make.front(options, engine, *load_text(options)), settings, entry=entry), started)
        finally:
            engine.abandon()


def _serve_several(make: ClusterMaker, given: list[EngineOptions], settings: ServeSettings) -> None:
    """Serves several models. Each stays loaded once it was; its fleet decides how many replicas there are."""
    from kvasir.serve.hosting.model_manager import ModelManager
    from kvasir.serve.server import run as run_server

    offers = GivenOffers([_offer(options) for options in given])
    with ShownStart("the list of models", make.verbose) as started:
        run_server(ModelManager(offers, make, settings, keep_alive=-1.0, max_loaded=len(given)), started)


def _offer(given: EngineOptions) -> Offer:
    """A model that the server may load. Raises KvasirError if this node does not have it."""
    options, entry = resolve(given)
    name = given.served_model_name or given.model
    files = find_model(options.model)
    size = sum(path.stat().st_size for path in files.weights)
    return Offer(name, name, size, read_details(files), lambda: options, entry, int(time.time()))
