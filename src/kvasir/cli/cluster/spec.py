"""What an actor is told at its start, and what it answers: data in JSON, so that no object of Python is passed on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from kvasir.cli.cluster.config import ClusterPlan, ModelPlan, Reach, Resources
from kvasir.config import GIB, EngineOptions


class ReplicaSpec(msgspec.Struct, frozen=True):
    """A replica. options: of its engine, with the paths of its node; folder: what relative ones are relative to.
    reach: None for a Unix socket. hang: seconds without progress before its engine is killed."""

    model: str
    index: int
    options: EngineOptions
    resources: Resources
    reach: Reach | None
    hang: float
    folder: str

    @property
    def actor(self) -> str:
        """The name of its actor, which differs when anything that is given differs."""
        digest = hashlib.sha256(encode(self)).hexdigest()[:16]
        return f"{self.model}/{self.index}/{digest}"


class Started(msgspec.Struct, frozen=True):
    """What an actor answers: where it serves; or, as its engine did not start, the error and what to do."""

    address: str = ""
    error: str = ""
    hint: str = ""


def encode(value: ReplicaSpec | Started) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def decode_spec(data: bytes) -> ReplicaSpec:
    return msgspec.json.decode(data, type=ReplicaSpec, dec_hook=lambda kind, text: Path(text))


def decode_started(data: bytes) -> Started:
    return msgspec.json.decode(data, type=Started)


def spec_of(plan: ClusterPlan, model: ModelPlan, index: int, hang: float, sockets: Sequence[str]) -> ReplicaSpec:
    """One replica of a model. sockets: where those that continue answers take blocks, if there are roles."""
    options, fleet = model.options, model.fleet
    if options.cache_dir is not None:
        folder = str(Path(options.cache_dir) / f"replica-{index}")
        options = replace(options, cache_dir=folder, cache_disk=max(1, (options.cache_disk or 16 * GIB) // fleet.most))
    if fleet.prefill_replicas:
        first = index < fleet.prefill_replicas
        options = replace(options, role="prefill" if first else "decode")
        if sockets and first:
            options = replace(options, transfer_peer=list(sockets))
        elif sockets:
            options = replace(options, transfer_listen=sockets[index - fleet.prefill_replicas])
    return ReplicaSpec(model.name, index, options, model.resources, plan.reach, hang, str(Path.cwd()))
