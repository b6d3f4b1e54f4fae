"""Exchanges of blocks between engines in one process, for tests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvasir.kv.tiers.block import StoreFacts
from kvasir.kv.transfer.exchange import BlockExchange, ExchangeOptions
from kvasir.kv.transfer.link import parse_address
from tests.kv._tiers import FACTS

KEY = b"the key of all engines"


def certificate(folder: Path) -> Path:
    """A PEM file with a new key and its own certificate."""
    key, cert, both = folder / "key.pem", folder / "cert.pem", folder / "both.pem"
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    names = ("-subj", "/CN=kvasir", "-keyout", str(key), "-out", str(cert))
    subprocess.run(["openssl", *new, *names], check=True, capture_output=True)
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    return both


@dataclass
class Weights:
    """What is known of an engine's weights."""

    value: str | None = "weights"

    def close(self) -> None: ...


def options_of(listen: Path | str | None = None, *peers: Path | str, **more) -> ExchangeOptions:
    address = parse_address(str(listen)) if listen else None
    return ExchangeOptions(address, tuple(map(str, peers)), **{"max_bytes": 1 << 20, **more})


@contextmanager
def exchange(
    listen: Path | str | None = None,
    *peers: Path | str,
    facts: StoreFacts = FACTS,
    weights: Weights | None = None,
    **more,
) -> Iterator[BlockExchange]:
    found = BlockExchange(facts, weights or Weights(), options_of(listen, *peers, **more))
    try:
        yield found
    finally:
        found.close(1.0)
