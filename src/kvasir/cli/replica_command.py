"""The command `kvasir replica`: its options and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvasir.cli.arguments import Verbose
from kvasir.cli.flags import engine_flags
from kvasir.config import EngineOptions


@engine_flags
def replica(
    model: Annotated[str, typer.Argument(help="As for serve.")],
    *,
    engine: EngineOptions,
    replica_key: Annotated[Path, typer.Option(help="File with the key that servers must know (mode 600).")],
    host: Annotated[str, typer.Option(help="Address to listen on; a public one needs TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 9100,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the replica's certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's private key.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="PEM file of CAs that must have signed clients' certificates.")
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds for running requests to finish here at a graceful stop.")] = 0.0,
    engine_timeout: Annotated[float, typer.Option(help="Seconds without progress before the engine is killed.")] = 20.0,
    verbose: Verbose = False,
) -> None:
    """Serve an engine to `kvasir serve --replica` in other processes or on other machines.

    Example: kvasir replica qwen3-8b --host 0.0.0.0 --replica-key key --tls-cert server.crt --tls-key server.key

    Example: kvasir serve qwen3-8b --replica tls://one:9100 --replica tls://two:9100 --replica-key key
    """
    from kvasir.cli import replica as command

    address = command.ReplicaAddress(host, port, replica_key, tls_cert, tls_key, tls_ca)
    command.run(engine, address, drain, engine_timeout, verbose)
