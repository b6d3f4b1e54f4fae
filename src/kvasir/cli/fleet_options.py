"""Options of `kvasir serve` for a model that several engine processes serve; see docs/fleet.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvasir.config import EngineOptions, option
from kvasir.errors import ConfigError
from kvasir.fleet.autoscale import Limits
from kvasir.fleet.cost import POLICIES

# ruff: noqa: RUF009 - what `option` makes is a field

MOST_REPLICAS = 1024


@dataclass(frozen=True, slots=True)
class FleetOptions:
    replicas: int = option(
        1,
        "Engine processes that serve the model; they divide the processors and the memory.",
        *("--replicas", "--data-parallel-size", "-dp", "--dp", "--dp-size"),
    )
    max_replicas: int | None = option(None, "Most replicas while the server runs (default: as many as at the start).")
    min_replicas: int | None = option(
        None, "Let the load change the number of replicas, down to this one; 0: without requests there is none."
    )
    scale_down_delay: float = option(
        300.0,
        "Seconds of less load after which replicas end.",
        *("--scale-down-delay", "--downscale-delay-s"),
    )
    prefill_replicas: int | None = option(None, "How many of the replicas compute only prompts and first tokens.")
    decode_replicas: int | None = option(None, "How many of the replicas continue the answers that those have begun.")
    replica: list[str] | None = option(
        None, "Address of an engine that `kvasir replica` serves, tls://HOST:PORT (repeatable), instead of own engines."
    )
    replica_key: Path | None = option(None, "File with the key of these engines (mode 600).")
    replica_ca: Path | None = option(None, "PEM file of the CAs of their certificates (default: the system's).")
    router_policy: str = option(
        "cost", f"Which replica gets a request: {', '.join(POLICIES[:-1])} or {POLICIES[-1]}; cost predicts seconds."
    )
    kv_events: str | None = option(
        None,
        'Publish changes of the prefix cache as vLLM does: {"enable_kv_cache_events": true, "publisher": "zmq", '
        '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}; * is the address of --host.',
        *("--kv-events", "--kv-events-config"),
    )

    @property
    def count(self) -> int:
        """Replicas at the start."""
        if self.replica:
            return len(self.replica)
        return (self.prefill_replicas or 0) + (self.decode_replicas or 0) or max(self.replicas, self.min_replicas or 1)

    @property
    def most(self) -> int:
        """Replicas among which the machine is divided."""
        return max(self.count, self.max_replicas or 1)

    @property
    def several(self) -> bool:
        """Whether there is a fleet, if only of one replica that comes and goes."""
        return self.most > 1 or self.min_replicas is not None

    @property
    def limits(self) -> Limits | None:
        """Of the number of replicas, if the load changes it."""
        return None if self.min_replicas is None else Limits(self.min_replicas, self.most, self.scale_down_delay)

    def check(self, options: EngineOptions, alone: bool) -> None:
        """Raises ConfigError. alone: whether the server has a single model."""
        for name in ("replicas", "max_replicas", "prefill_replicas", "decode_replicas"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST_REPLICAS:
                raise ConfigError(f"{name} is {value}", f"expected 1 to {MOST_REPLICAS}")
        self._check_roles(options)
        self._check_remote(alone)
        self._check_limits()
        if self.max_replicas is not None and self.max_replicas < self.count:
            raise ConfigError(f"max_replicas is {self.max_replicas}, below the {self.count} at the start", "raise it")
        if self.router_policy not in POLICIES:
            raise ConfigError(f"router_policy is {self.router_policy!r:.80}", f"expected one of {', '.join(POLICIES)}")
        if self.kv_events is not None and (self.replica or not alone or not options.prefix_cache):
            raise ConfigError(
                "kv_events is for a server of a single model whose engines are here and have a prefix cache",
                "name one model, without --replica and --no-prefix-cache, or leave --kv-events out",
            )
        if not self.several:
            return
        if not alone:
            raise ConfigError("replicas apply to a single model, and this server has several", "name one model")
        if options.cache_offer or options.cache_peer:
            raise ConfigError("cache_offer and cache_peer are for one engine", "leave them out, or use one replica")

    def _check_limits(self) -> None:
        """Raises ConfigError for limits of the number of replicas where it cannot change, or that are out of range."""
        if not 0 <= self.scale_down_delay <= 86400:
            raise ConfigError(f"scale_down_delay is {self.scale_down_delay}", "expected 0 to 86400 seconds")
        if self.min_replicas is None:
            return
        if not 0 <= self.min_replicas <= MOST_REPLICAS:
            raise ConfigError(f"min_replicas is {self.min_replicas}", f"expected 0 to {MOST_REPLICAS}")
        if self.replica or self.prefill_replicas:
            raise ConfigError(
                "min_replicas is for replicas that this server starts and that have no roles",
                "leave out --min-replicas, or --replica, --prefill-replicas and --decode-replicas",
            )

    def _check_remote(self, alone: bool) -> None:
        """Raises ConfigError for engines elsewhere beside own ones, or without a key."""
        from kvasir.engine.remote import HostAddress  # not for --help

        if not self.replica:
            if self.replica_key or self.replica_ca:
                raise ConfigError("replica_key and replica_ca are for engines elsewhere", "give --replica ADDRESS")
            return
        if (self.replicas, self.max_replicas, self.prefill_replicas) != (1, None, None):
            raise ConfigError("--replica names engines elsewhere, and --replicas makes some here", "give one of them")
        if not alone:
            raise ConfigError("replicas apply to a single model, and this server has several", "name one model")
        if len(set(self.replica)) < len(self.replica):
            raise ConfigError("the same replica is given twice", "give each address once")
        if any(not HostAddress.parse(text).path for text in self.replica) and not self.replica_key:
            raise ConfigError("engines on other machines need a key", "give --replica-key FILE")

    def _check_roles(self, options: EngineOptions) -> None:
        """Raises ConfigError for roles that do not add up, or need what the options exclude."""
        if self.prefill_replicas is None and self.decode_replicas is None:
            return
        if self.prefill_replicas is None or self.decode_replicas is None:
            raise ConfigError("prefill_replicas and decode_replicas belong together", "give both")
        if self.replicas not in (1, self.count):
            raise ConfigError(
                f"replicas is {self.replicas}, and {self.count} have roles", "leave --replicas out, or give their sum"
            )
        if self.max_replicas not in (None, self.count):
            raise ConfigError("replicas with roles keep their number", "leave --max-replicas out")
        if options.role != "both" or options.transfer_listen or options.transfer_peer or not options.prefix_cache:
            raise ConfigError(
                "replicas with roles exchange blocks among themselves",
                "leave out --role, --transfer-listen, --transfer-peer and --no-prefix-cache",
            )
