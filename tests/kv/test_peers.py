"""PeerTier and PeerServer: sound engines give each other the right bytes, through a socket of one user alone."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.errors import ConfigError
from kvasir.kv.peers import tier as peer_tier
from kvasir.kv.peers import wire
from kvasir.kv.peers.server import PeerServer
from kvasir.kv.peers.tier import PeerTier
from kvasir.kv.tiers.disk import DiskTier
from kvasir.kv.transfer import block_socket
from kvasir.kv.transfer.link import Address
from kvasir.kv.transfer.security import Credentials
from tests.kv._disk import path_of
from tests.kv._peer import BLOCK, asking, hostile, keep
from tests.kv._tiers import FACTS, blocks_of, load, payload_of, until
from tests.kv._transfer import KEY, certificate

pytestmark = pytest.mark.usefixtures("hurry")

# -- two sound engines -----------------------------------------------------------------------------------------


def test_blocks_of_a_peer_are_unchanged(server, disk, path):
    blocks = blocks_of(6)
    keys = [b.key for b in blocks]
    keep(disk, blocks[:4], (0, 1))
    with asking(path) as tier:
        assert tier.has(keys) == 0 and not tier.ask(keys)  # no peer has responded yet
        assert tier.ask(keys, 0, 10.0) and tier.has(keys) == 4
        assert tier.ask(keys, 1, 10.0) and tier.has(keys, 1) == 4
        for group in (0, 1):
            assert [load(tier, b, group) for b in blocks[:4]] == [payload_of(b, group) for b in blocks[:4]]
        assert load(tier, blocks[4]) == "missing"
        assert tier.stats().loads == {"loaded": 8, "missing": 1} and tier.stats().read_rate > 0
        assert not tier.save(blocks[5], 0, payload_of(blocks[5]))


def test_a_query_is_sent_once_and_waited_for_within_its_timeout(path, monkeypatch):
    """A peer that takes a connection and says nothing is a miss in the end."""
    keys, (other,) = [b.key for b in blocks_of(100)], blocks_of(1, b"other")
    sent, pack = [], wire.pack_has
    monkeypatch.setattr(wire, "pack_has", lambda keys, group: sent.append(list(keys)) or pack(keys, group))
    ended = threading.Event()
    with hostile(path, lambda link: ended.wait(10) and None), asking(path) as tier:
        for _ in range(200):
            assert not tier.ask(keys) and tier.has(keys) == 0
        assert not tier.ask(keys, 0, 0.01)
        ended.set()
        assert tier.ask(keys, 0, 10.0) and tier.has(keys) == 0
        assert tier.ask([other.key], 0, 10.0)
        assert sent == [keys, [other.key]]


def test_parts_after_a_gap_are_known_too(server, disk, path):
    """Of a group with a window only the last blocks of a prefix are stored."""
    blocks = blocks_of(6)
    keep(disk, blocks[3:5], (1,))
    with asking(path) as tier:
        assert tier.ask([b.key for b in blocks], 1, 10.0)
        assert [tier.has([b.key], 1) for b in blocks] == [0, 0, 0, 1, 1, 0]


def test_of_a_long_chain_the_beginning_is_asked(server, disk, path, monkeypatch):
    monkeypatch.setattr(wire, "MAX_KEYS", 8)
    blocks = blocks_of(30)
    keep(disk, blocks)
    with asking(path) as tier:
        keys = [b.key for b in blocks]
        assert tier.ask(keys, 0, 10.0) and tier.has(keys) == 8


def test_answers_are_forgotten(server, disk, path, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_tier, "KNOWN_SECONDS", 0.05)
    monkeypatch.setattr(peer_tier, "UNKNOWN_SECONDS", 0.05)
    monkeypatch.setattr(peer_tier, "MAX_ANSWERS", 5)
    blocks = blocks_of(5)
    keys = [b.key for b in blocks]
    with asking(path) as tier:
        assert tier.ask(keys, 0, 10.0) and tier.has(keys) == 0
        keep(disk, blocks)
        until(lambda: tier.ask(keys, 0, 1.0) and tier.has(keys) == 5)
        for block in blocks[2:]:
            path_of(tmp_path / "tier", block).unlink()
            assert load(disk, block) == "missing"
        until(lambda: tier.ask(keys, 0, 1.0) and tier.has(keys) == 2)
        for i in range(20):
            tier.ask([b.key for b in blocks_of(1, b"%d" % i)], 0, 10.0)
        assert tier.has(keys) == 0, "answers about more than 5 parts are kept"


@pytest.mark.parametrize("facts", [replace(FACTS, numerics="n0"), replace(FACTS, model="tiny@2")])
def test_engines_of_other_facts_give_each_other_nothing(server, disk, path, facts):
    (block,) = blocks_of(1)
    keep(disk, [block])
    with asking(path, facts=facts) as tier:
        assert load(tier, block) == "peer" and tier.has([block.key]) == 0
        assert tier.ask([block.key], 0, 10.0) and tier.has([block.key]) == 0


SERVER = """
import sys, time
from pathlib import Path
from kvasir.kv.tiers.disk import DiskTier
from kvasir.kv.peers.server import PeerServer
from kvasir.kv.transfer.link import Address
from tests.kv._tiers import FACTS, blocks_of, payload_of

tier = DiskTier(Path(sys.argv[2]), FACTS, 1 << 20)
server = PeerServer(Address(Path(sys.argv[1])), tier)
for block in blocks_of(20):
    tier.save(block, 0, payload_of(block))
while tier.stats().saves != {"saved": 20}:
    time.sleep(0.001)
print("ready", flush=True)
time.sleep(100)
"""


def test_a_peer_process_dies_and_comes_back(path, tmp_path):
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    blocks = blocks_of(20)
    with asking(path) as tier:
        assert load(tier, blocks[0]) == "peer"  # no peer exists yet
        for life in range(2):
            command = [sys.executable, "-c", SERVER, path, tmp_path / f"peer{life}"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
                assert process.stdout and process.stdout.readline() == "ready\n"
                until(lambda: load(tier, blocks[0]) == payload_of(blocks[0]))
                assert [load(tier, b) for b in blocks] == [payload_of(b) for b in blocks]
                process.kill()
            assert load(tier, blocks[1]) == "peer"


# -- over the network --------------------------------------------------------------------------------------------


@pytest.fixture
def known(tmp_path) -> Credentials:
    return Credentials(KEY, certificate(tmp_path))


@contextmanager
def over_tcp(disk: DiskTier, known: Credentials, other: Credentials) -> Iterator[PeerTier]:
    """A client with credentials `other` of a server with `known`."""
    server = PeerServer(Address(host="127.0.0.1", port=0), disk, known)
    tier = PeerTier(server.address, FACTS, credentials=other)
    try:
        yield tier
    finally:
        tier.close()
        server.close()


def test_blocks_come_over_tcp(disk, known):
    blocks = blocks_of(4)
    keep(disk, blocks)
    with over_tcp(disk, known, known) as tier:
        assert tier.ask([b.key for b in blocks], 0, 10.0) and tier.has([b.key for b in blocks]) == 4
        assert [load(tier, b) for b in blocks] == [payload_of(b) for b in blocks]


@pytest.mark.parametrize("wrong", ["key", "certificate"])
def test_who_has_another_key_or_certificate_gets_nothing(disk, known, tmp_path, wrong):
    keep(disk, [BLOCK])
    own = tmp_path / "own"
    own.mkdir()
    other = replace(known, key=b"another key than theirs") if wrong == "key" else Credentials(KEY, certificate(own))
    with over_tcp(disk, known, other) as tier:
        assert load(tier, BLOCK) == "peer"
        assert tier.ask([BLOCK.key], 0, 10.0) and tier.has([BLOCK.key]) == 0


def test_without_credentials_there_is_no_network(disk, known):
    address = Address(host="127.0.0.1", port=0)
    for make in (lambda: PeerServer(address, disk), lambda: PeerTier(address, FACTS)):
        with pytest.raises(ConfigError, match="key and a certificate"):
            make()


# -- the socket ------------------------------------------------------------------------------------------------


def test_the_socket_is_of_this_user_alone(server, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_open_to_others_is_refused_by_both(path, disk):
    path.parent.chmod(0o755)
    for make in (lambda: PeerServer(Address(path), disk), lambda: PeerTier(Address(path), FACTS)):
        with pytest.raises(ConfigError, match="open"):
            make()
    path.parent.chmod(0o700)
    server = PeerServer(Address(path), disk)
    keep(disk, [BLOCK])
    with asking(path) as tier:
        path.parent.chmod(0o755)
        assert load(tier, BLOCK) == "peer"
        path.parent.chmod(0o700)
        until(lambda: load(tier, BLOCK) == payload_of(BLOCK))
    server.close()


STRANGER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(10)
    sock.connect(sys.argv[1])
    print(sock.recv(1))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_nothing_even_from_an_open_folder(disk):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder, "kv")
        server = PeerServer(Address(path), disk)
        path.parent.chmod(0o711)
        path.chmod(0o666)
        ran = subprocess.run([sys.executable, "-c", STRANGER, path], capture_output=True, text=True, check=True)
        server.close()
    assert ran.stdout == "b''\n"


def test_the_socket_of_another_user_is_not_asked(server, disk, path, monkeypatch):
    keep(disk, [BLOCK])
    with asking(path) as tier:
        monkeypatch.setattr(block_socket, "of_this_user", lambda sock: False)
        assert load(tier, BLOCK) == "peer"


def test_the_socket_of_a_dead_server_is_replaced_and_of_a_living_one_is_not(server, path, disk, tmp_path):
    with pytest.raises(ConfigError, match="another engine"):
        PeerServer(Address(path), disk)
    dead = path.with_name("dead")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.fspath(dead))
    second = PeerServer(Address(dead), disk)
    second.close()
    assert not dead.exists()
    file = path.with_name("file")
    file.write_text("not ours")
    with pytest.raises(ConfigError, match="not a socket"):
        PeerServer(Address(file), disk)
    assert file.read_text() == "not ours"
    for make in (lambda p: PeerServer(Address(p), disk), lambda p: PeerTier(Address(p), FACTS)):
        with pytest.raises(ConfigError, match="too long"):
            make(path.with_name("x" * 100))


def test_closing_ends_connections_and_leaves_no_descriptor(path, disk):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    keep(disk, [BLOCK])
    before = descriptors(), threading.active_count()
    server = PeerServer(Address(path), disk)
    with asking(path) as tier:
        assert load(tier, BLOCK) == payload_of(BLOCK)
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 2
        assert load(tier, BLOCK) == "peer"
    # Tests before this one may still close some of theirs.
    until(lambda: descriptors() <= before[0] and threading.active_count() <= before[1])
