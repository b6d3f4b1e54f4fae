"""`kvasir replica`: serves one engine to servers in other processes or on other machines, over TCP."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

from kvasir.cli.opening import ShownStart
from kvasir.cli.replicas import read_secret
from kvasir.cli.resolve import resolve
from kvasir.config import EngineOptions, check
from kvasir.engine.host import EngineHost
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError
from kvasir.serve.http.networks import is_loopback
from kvasir.serve.http.tls import Tls


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Where a replica listens. key: the file of its key. cert, cert_key, ca: PEM files; see Tls."""

    host: str
    port: int
    key: Path
    cert: Path | None = None
    cert_key: Path | None = None
    ca: Path | None = None

    def tls(self) -> Tls | None:
        """Raises ConfigError for files that do not belong together, or a public address without TLS."""
        if bool(self.cert) != bool(self.cert_key) or (self.ca and not self.cert):
            raise ConfigError("TLS needs a certificate and its key", "give --tls-cert and --tls-key")
        if self.cert and self.cert_key:
            return Tls(self.cert, self.cert_key, self.ca)
        if not is_loopback(self.host):
            raise ConfigError(f"{self.host} is a public address and there is no TLS", "give --tls-cert and --tls-key")
        return None


def run(options: EngineOptions, address: ReplicaAddress, drain: float, engine_timeout: float, verbose: bool) -> None:
    """Serves until SIGTERM or SIGINT. Raises KvasirError."""
    tls, key = address.tls(), read_secret(address.key)
    context = tls.context() if tls else None
    options, _ = resolve(options)
    check(options)
    name = options.served_model_name or options.model
    with ShownStart(name, verbose) as started:
        engine = ProcessEngine(
            options, hang_seconds=engine_timeout, progress=started.progress, patient=True, hands_over=True
        )
        asyncio.run(_serve(engine, EngineHost(engine, key), address, context, drain, started))


async def _serve(
    engine: ProcessEngine, host: EngineHost, address: ReplicaAddress, context, drain: float, started: ShownStart
) -> None:
    ending = asyncio.Event()
    for kind in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(kind, ending.set)
    await engine.start()
    try:
        port = await host.listen_tcp(address.host, address.port, context)
        name = f"[{address.host}]" if ":" in address.host else address.host
        where = f"{'tls' if context else 'tcp'}://{name}:{port}"
        started.show(f"Kvasir serves a replica of {engine.info.name} at {where}", engine.summary)
        await ending.wait()
        await host.close(drain)
    finally:
        await engine.stop()
