"""What `kvasir fleet CONFIG --check` prints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from kvasir.cli.cluster.config import ClusterPlan, ModelPlan, Reach, Resources
from kvasir.config import EngineOptions

_SHOWN_APART = ("model", "served_model_name", "lora", "host_share")


def shown(plan: ClusterPlan) -> Iterator[str]:
    """Lines that describe the fleet."""
    server = plan.server
    scheme = "https" if server.operation.tls_cert else "http"
    keys = "" if server.api_key or server.keys else ", without keys"
    yield f"Kvasir would serve the fleet {plan.name}"
    yield f"  server    {scheme}://{server.host}:{server.port}{keys}, API processes: {server.operation.api_workers}"
    yield f"  ray       {plan.ray.address or 'a cluster of its own on this machine'}"
    yield f"  replicas  {_reached(plan.reach)}"
    for model in plan.models:
        yield from _model(model)


def _reached(reach: Reach | None) -> str:
    if reach is None:
        return "on the server's node, over Unix sockets"
    return f"on any node, over TLS with the certificate {reach.cert} for {reach.name}"


def _model(model: ModelPlan) -> Iterator[str]:
    options, fleet = model.options, model.fleet
    title = model.name if model.name == options.model else f"{model.name} ({options.model})"
    yield f"  model     {title}"
    yield f"    replicas   {_count(model)}; router: {fleet.router_policy}"
    yield f"    each needs {needs(model.resources)}"
    if given := _options(options):
        yield f"    options    {given}"
    for text in options.lora or ():
        yield f"    adapter    {text}"


def _count(model: ModelPlan) -> str:
    fleet = model.fleet
    if fleet.prefill_replicas:
        return f"{fleet.prefill_replicas} for prompts, {fleet.decode_replicas} for answers"
    if limits := fleet.limits:
        return f"{fleet.count} at the start, then {limits.least} to {limits.most}, as the load asks"
    return f"{fleet.count}" if fleet.most == fleet.count else f"{fleet.count}, up to {fleet.most}"


def needs(resources: Resources) -> str:
    """What Ray keeps free for a replica."""
    parts = [f"{resources.cpus:g} CPU"]
    if resources.gpus:
        parts.append(f"{resources.gpus:g} GPU")
    if memory := resources.memory_bytes:
        parts.append(f"{memory / (1 << 30):.3g} GiB")
    parts += [f"{amount:g} {name}" for name, amount in resources.custom.items()]
    return ", ".join(parts)


def _options(options: EngineOptions) -> str:
    """Those that were given."""
    named = (f for f in fields(options) if f.name not in _SHOWN_APART)
    given = ((f.name, getattr(options, f.name)) for f in named if getattr(options, f.name) != f.default)
    return ", ".join(f"{name}={value}" for name, value in given)
