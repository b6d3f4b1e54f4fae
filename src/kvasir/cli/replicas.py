"""The engine of a model that several processes of this machine serve, and how they divide the machine."""

from __future__ import annotations

import atexit
import ssl
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvasir.cli.fleet_options import FleetOptions
from kvasir.config import EngineOptions
from kvasir.engine.division import divided, processors_of
from kvasir.engine.host import MIN_KEY
from kvasir.engine.kv_events import KvEvents, KvEventsConfig, check_ranks
from kvasir.engine.progress import Progress
from kvasir.engine.publishing import PublishingEngine
from kvasir.engine.remote import HostAddress, RemoteEngine
from kvasir.engine.sockets import make_socket_path, remove_socket
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError
from kvasir.fleet.engine import FleetEngine
from kvasir.serve.auth.keys import read_private

START_SECONDS = 60.0  # for the processes of replicas to be ready


def fleet_of(
    options: EngineOptions,
    fleet: FleetOptions,
    *,
    hang_seconds: float,
    progress: Progress | None = None,
    events: KvEventsConfig | None = None,
    **more: Any,
) -> FleetEngine:
    """The engine, which is not started. progress: follows the first replica. events: how the changes of the prefix
    caches are published. Raises ConfigError if the replicas' ports overlap."""
    publishers = [KvEvents(events, index) for index in range(fleet.most)] if events else []
    if events:
        check_ranks(events, fleet.most)
    processors = processors_of(options, fleet.most)
    sockets = [make_socket_path() for _ in range(fleet.decode_replicas or 0)]
    for path in sockets:
        atexit.register(remove_socket, path)

    def make(index: int) -> ProcessEngine:
        own = with_role(divided(options, fleet.most, index), fleet, index, [str(path) for path in sockets])
        given: dict[str, Any] = {
            "hang_seconds": hang_seconds,
            "progress": None if index else progress,
            "hands_over": True,
            "processors": processors[index],
            **more,
        }
        return PublishingEngine(own, events=publishers[index], **given) if events else ProcessEngine(own, **given)

    given = {"policy": fleet.router_policy, "max_waiting": options.max_waiting, "limits": fleet.limits}
    return FleetEngine(make, fleet.count, most=fleet.most, **given)


def remote_fleet_of(options: EngineOptions, fleet: FleetOptions) -> FleetEngine:
    """The engine whose replicas other processes or machines serve. Raises ConfigError."""
    addresses = [HostAddress.parse(text) for text in fleet.replica or ()]
    key = read_secret(fleet.replica_key) if fleet.replica_key else ""
    encrypts = any(address.tls and not address.path for address in addresses)
    tls = client_context(fleet.replica_ca) if encrypts else None

    def make(index: int) -> RemoteEngine:
        return RemoteEngine(addresses[index], key, tls, patience=START_SECONDS)

    return FleetEngine(make, len(addresses), policy=fleet.router_policy, max_waiting=options.max_waiting)


def client_context(ca: Path | None) -> ssl.SSLContext:
    """The TLS of a client that trusts the authorities in a PEM file, by default the system's. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{ca}: {error}", "expected certificates in PEM") from None


def read_secret(path: Path) -> str:
    """The key in a file that only its owner may access. Raises ConfigError."""
    try:
        key = read_private(path, "a key").decode("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    if len(key) < MIN_KEY or not key.isprintable():
        raise ConfigError(f"{path} holds no key", f"expected one line of {MIN_KEY} or more printable ASCII characters")
    return key


def with_role(options: EngineOptions, fleet: FleetOptions, index: int, sockets: Sequence[str]) -> EngineOptions:
    """The options of a replica with its role, if the fleet has roles: those that compute prompts come first. sockets:
    where the others take blocks."""
    if not sockets:
        return options
    first = fleet.prefill_replicas or 0
    if index < first:
        return replace(options, role="prefill", transfer_peer=list(sockets))
    return replace(options, role="decode", transfer_listen=sockets[index - first])
