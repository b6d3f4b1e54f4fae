import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvasir.kv.peers import server as peer_server
from kvasir.kv.peers import tier as peer_tier
from kvasir.kv.peers import wire
from kvasir.kv.peers.server import PeerServer
from kvasir.kv.tiers.disk import DiskTier
from kvasir.kv.transfer import link
from kvasir.kv.transfer.link import Address
from tests.kv._tiers import FACTS, until


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def hurry(monkeypatch):
    """A second's patience is enough for threads of one process."""
    monkeypatch.setattr(wire, "EXCHANGE_SECONDS", 2.0)
    monkeypatch.setattr(peer_server, "LOAD_SECONDS", 1.5)
    monkeypatch.setattr(link, "GREETING_SECONDS", 2.0)
    monkeypatch.setattr(peer_tier, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(peer_tier, "LONGEST_PAUSE", 0.05)


@pytest.fixture
def path(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder / "kv"


@pytest.fixture
def disk(tmp_path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "tier", FACTS, 1 << 20)
    assert tier.wait_scanned(30)
    yield tier
    tier.close()


@pytest.fixture
def server(path, disk) -> Iterator[PeerServer]:
    server = PeerServer(Address(path), disk)
    yield server
    server.close()
    until(lambda: not any(thread.name.startswith("kv-peer-") for thread in threading.enumerate()))
    assert disk.stats().open_loads == 0
