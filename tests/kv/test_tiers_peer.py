"""PeerTier and PeerServer: right bytes or a miss, in bounded time and memory, whoever is at the other end."""

import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir.errors import ConfigError
from kvasir.kv.tiers import peer, record, wire
from kvasir.kv.tiers.block import Block
from kvasir.kv.tiers.disk import DiskTier
from kvasir.kv.tiers.peer import PeerServer, PeerTier
from kvasir.kv.tiers.wire import Wire
from tests.kv._tiers import FACTS, blocks_of, load, payload_of, until


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """A second's patience is enough for threads of one process."""
    monkeypatch.setattr(peer, "EXCHANGE_SECONDS", 2.0)
    monkeypatch.setattr(peer, "LOAD_SECONDS", 1.5)
    monkeypatch.setattr(peer, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(peer, "LONGEST_PAUSE", 0.05)


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
    server = PeerServer(path, disk)
    yield server
    server.close()
    until(lambda: not server._connections and not server._threads)
    assert disk.stats().open_loads == 0


@contextmanager
def asking(path: Path, **kwargs) -> Iterator[PeerTier]:
    tier = PeerTier(path, kwargs.pop("facts", FACTS), **kwargs)
    try:
        yield tier
    finally:
        begin = time.monotonic()
        tier.close()
        assert time.monotonic() - begin < 3
        assert tier.stats().open_loads == 0


def keep(tier: DiskTier, blocks: list[Block], groups: tuple[int, ...] = (0,)) -> None:
    for block in blocks:
        for group in groups:
            tier.save(block, group, payload_of(block, group))
    until(lambda: all(tier.has([b.key for b in blocks], g) == len(blocks) for g in groups))
    until(lambda: tier.stats().queued_bytes == 0)


# -- two sound engines -----------------------------------------------------------------------------------------


def test_a_peers_blocks_come_as_they_are(server, disk, path):
    blocks = blocks_of(6)
    keys = [b.key for b in blocks]
    keep(disk, blocks[:4], (0, 1))
    with asking(path) as tier:
        assert tier.has(keys) == 0 and not tier.ask(keys)  # nobody has answered yet
        assert tier.ask(keys, 0, 10.0) and tier.has(keys) == 4
        assert tier.ask(keys, 1, 10.0) and tier.has(keys, 1) == 4
        for group in (0, 1):
            assert [load(tier, b, group) for b in blocks[:4]] == [payload_of(b, group) for b in blocks[:4]]
        assert load(tier, blocks[4]) == "missing"
        assert tier.stats().loads == {"loaded": 8, "missing": 1} and tier.stats().read_rate > 0
        assert not tier.save(blocks[5], 0, payload_of(blocks[5]))


def test_a_question_is_asked_once_and_waited_for_as_long_as_was_said(path):
    """A peer that takes a connection and says nothing is a miss in the end."""
    keys = [b.key for b in blocks_of(100)]
    ended = threading.Event()
    with hostile(path, lambda link: ended.wait(10) and None), asking(path) as tier:
        for _ in range(200):
            assert not tier.ask(keys) and tier.has(keys) == 0
        assert not tier.ask(keys, 0, 0.01)
        assert tier._asker.cost <= len(keys)
        ended.set()
        assert tier.ask(keys, 0, 10.0) and tier.has(keys) == 0


def test_what_lies_behind_a_gap_is_known_too(server, disk, path):
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


def test_answers_are_forgotten(server, disk, path, monkeypatch):
    monkeypatch.setattr(peer, "KNOWN_SECONDS", 0.05)
    monkeypatch.setattr(peer, "UNKNOWN_SECONDS", 0.05)
    monkeypatch.setattr(peer, "MAX_ANSWERS", 5)
    blocks = blocks_of(5)
    keys = [b.key for b in blocks]
    with asking(path) as tier:
        assert tier.ask(keys, 0, 10.0) and tier.has(keys) == 0
        keep(disk, blocks)
        until(lambda: tier.ask(keys, 0, 1.0) and tier.has(keys) == 5)
        for block in blocks[2:]:
            disk._remove((block.key, 0))
        until(lambda: tier.ask(keys, 0, 1.0) and tier.has(keys) == 2)
        for i in range(20):
            tier.ask([b.key for b in blocks_of(1, b"%d" % i)], 0, 10.0)
        assert len(tier._answers) <= 5 and not tier._asked


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
from kvasir.kv.tiers.peer import PeerServer
from tests.kv._tiers import FACTS, blocks_of, payload_of

tier = DiskTier(Path(sys.argv[2]), FACTS, 1 << 20)
server = PeerServer(Path(sys.argv[1]), tier)
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
        assert load(tier, blocks[0]) == "peer"  # nobody is there yet
        for life in range(2):
            command = [sys.executable, "-c", SERVER, path, tmp_path / f"peer{life}"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
                assert process.stdout and process.stdout.readline() == "ready\n"
                until(lambda: load(tier, blocks[0]) == payload_of(blocks[0]))
                assert [load(tier, b) for b in blocks] == [payload_of(b) for b in blocks]
                process.kill()
            assert load(tier, blocks[1]) == "peer"


# -- a server that is dead, slow or out of its mind -------------------------------------------------------------


@contextmanager
def hostile(path: Path, behave: Callable[[Wire], None], greet: bool = True) -> Iterator[None]:
    """A server that welcomes everybody and then does what `behave` says."""
    done = threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen()
    listener.settimeout(0.02)

    def talk(sock: socket.socket) -> None:
        link = Wire(sock)
        link.begin(30)
        with suppress(OSError, wire.WireError):
            if greet:
                link.body(link.head({wire.HELLO: 32})[1])
                link.send(wire.WELCOME)
            behave(link)
        link.close()

    def accept() -> None:
        talks = []
        while not done.is_set():
            with suppress(TimeoutError):
                talks.append(threading.Thread(target=talk, args=(listener.accept()[0],)))
                talks[-1].start()
        for thread in talks:
            thread.join()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield
    finally:
        done.set()
        acceptor.join()
        listener.close()
        path.unlink()


BLOCK = blocks_of(2)[1]
SEALED = record.seal(FACTS, BLOCK, 0, memoryview(payload_of(BLOCK))) + payload_of(BLOCK)


def question(link: Wire) -> None:
    _, length = link.head({wire.HAS: wire.HAS_BYTES, wire.LOAD: wire.LOAD_BYTES})
    link.body(length)


@pytest.mark.parametrize("greet", [True, False])
def test_a_silent_peer_is_a_miss_in_time(path, monkeypatch, greet):
    monkeypatch.setattr(peer, "EXCHANGE_SECONDS", 0.3)
    ended = threading.Event()
    with hostile(path, lambda link: ended.wait(10) and None, greet), asking(path) as tier:
        begin = time.monotonic()
        assert load(tier, BLOCK) == "peer"
        assert 0.2 < time.monotonic() - begin < 3
        ended.set()


def test_a_peer_that_drips_is_a_miss_in_time(path, monkeypatch):
    """Each byte arrives long before a timeout of its own; the whole does not."""
    monkeypatch.setattr(peer, "EXCHANGE_SECONDS", 0.4)

    def drip(link: Wire) -> None:
        question(link)
        for byte in wire.FRAME.pack(wire.RECORD, len(SEALED)) + SEALED:
            link.sock.sendall(bytes([byte]))
            time.sleep(0.02)

    with hostile(path, drip), asking(path) as tier:
        begin = time.monotonic()
        assert load(tier, BLOCK) == "peer"
        assert time.monotonic() - begin < 3


def test_after_a_failure_the_peer_is_left_alone(path, monkeypatch):
    monkeypatch.setattr(peer, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(peer, "LONGEST_PAUSE", 60.0)
    seen = []
    with hostile(path, seen.append), asking(path) as tier:
        assert [load(tier, BLOCK) for _ in range(20)] == ["peer"] * 20
        assert len(seen) == 1


def test_closing_does_not_wait_for_a_silent_peer(path, monkeypatch):
    monkeypatch.setattr(peer, "EXCHANGE_SECONDS", 30.0)
    ended = threading.Event()
    with hostile(path, lambda link: ended.wait(20) and None):
        with asking(path) as tier:
            ticket = tier.start_load(BLOCK)
            until(lambda: tier._records._wire)
            tier.cancel(ticket)
        ended.set()


@contextmanager
def no_large_body(most: int) -> Iterator[None]:
    """Fails when anything longer than `most` is allocated for a frame or a record."""
    sizes = []
    real = bytearray

    def measured(*args):
        if args and isinstance(args[0], int):
            sizes.append(args[0])
            assert args[0] <= most
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "bytearray", measured, raising=False)
        patch.setattr(record, "bytearray", measured, raising=False)
        yield
    assert all(size <= most for size in sizes)


LIES = {
    "longer than any record": wire.FRAME.pack(wire.RECORD, record.max_size(FACTS, 0) + 1),
    "huge": wire.FRAME.pack(wire.RECORD, 1 << 62),
    "unknown kind": wire.FRAME.pack(99, 4) + b"abcd",
    "an answer to another question": wire.FRAME.pack(wire.HELD, 1) + b"\x01",
    "a miss with a body": wire.FRAME.pack(wire.MISS, 1) + b"x",
    "an empty record": wire.FRAME.pack(wire.RECORD, 0),
    "cut off": wire.FRAME.pack(wire.RECORD, len(SEALED)) + SEALED[:-1],
    "half a frame's head": b"\x07\x01",
    "nothing": b"",
    "shorter frame": wire.FRAME.pack(wire.RECORD, len(SEALED) - 1) + SEALED,
    "longer frame": wire.FRAME.pack(wire.RECORD, len(SEALED) + 1) + SEALED + b"x",
    "flipped payload": wire.FRAME.pack(wire.RECORD, len(SEALED)) + SEALED[:-1] + bytes([SEALED[-1] ^ 1]),
    "huge sizes in the record": wire.FRAME.pack(wire.RECORD, record.PREFIX.size)
    + record.PREFIX.pack(record.MAGIC, record.FORMAT, 1 << 31, 1 << 62, bytes(32)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_no_lie_of_a_peer_is_believed(path, lie):
    def answer(link: Wire) -> None:
        question(link)
        link.sock.sendall(lie)

    with no_large_body(record.max_size(FACTS, 0)), hostile(path, answer), asking(path) as tier:
        assert load(tier, BLOCK) in ("peer", "truncated", "corrupt")


def test_a_sound_record_of_another_block_is_foreign(path):
    other = blocks_of(1)[0]
    data = record.seal(FACTS, other, 0, memoryview(payload_of(other))) + payload_of(other)

    def answer(link: Wire) -> None:
        question(link)
        link.send(wire.RECORD, data)

    with hostile(path, answer), asking(path) as tier:
        assert load(tier, BLOCK) == "foreign"


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=200), st.sampled_from([wire.RECORD, wire.MISS, wire.HELD, wire.WELCOME, 0]))
def test_no_garbage_of_a_peer_is_believed(path, data, kind):
    def answer(link: Wire) -> None:
        question(link)
        link.send(kind, data)

    with hostile(path, answer), asking(path) as tier:
        reason = "missing" if kind == wire.MISS and not data else None
        assert load(tier, BLOCK) in ((reason,) if reason else ("peer", "truncated", "corrupt"))
        assert tier.ask([BLOCK.key], 0, 10.0)
        assert tier.has([BLOCK.key]) == (kind == wire.HELD and data == b"\x01")


@pytest.mark.parametrize("said", [b"", b"\x01", b"\x01" * 2, b"\x01" * 4, b"\x01\x01\x02"])
def test_an_answer_to_other_keys_is_none(path, said):
    def answer(link: Wire) -> None:
        question(link)
        link.send(wire.HELD, said)

    keys = [b.key for b in blocks_of(3)]
    with hostile(path, answer), asking(path) as tier:
        assert tier.ask(keys, 0, 10.0) and tier.has(keys) == 0


# -- an engine that asks and is out of its mind ------------------------------------------------------------------


@contextmanager
def connected(path: Path, greet: bool = True) -> Iterator[Wire]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(os.fspath(path))
        link = Wire(sock)
        link.begin(10)
        if greet:
            link.send(wire.HELLO, FACTS.digest())
            assert link.head({wire.WELCOME: 0}) == (wire.WELCOME, 0)
        yield link


def hung_up(link: Wire) -> bool:
    """Whether the server ends the connection without an answer."""
    link.sock.settimeout(10)
    try:
        return link.sock.recv(1) == b""
    except ConnectionResetError:
        return True


HOSTILE_QUESTIONS = {
    "garbage": bytes(range(200)),
    "a huge frame": wire.FRAME.pack(wire.LOAD, 1 << 62),
    "too many keys": wire.FRAME.pack(wire.HAS, wire.HAS_BYTES + 1),
    "too long a name": wire.FRAME.pack(wire.LOAD, wire.LOAD_BYTES + 1),
    "an answer": wire.FRAME.pack(wire.WELCOME, 0),
    "half a key": wire.FRAME.pack(wire.HAS, 20) + bytes(20),
    "no group": wire.FRAME.pack(wire.HAS, 0),
    "a group that is not there": wire.FRAME.pack(wire.HAS, 36) + struct.pack("<I", 2) + bytes(32),
    "no msgpack": wire.FRAME.pack(wire.LOAD, 3) + b"\xc1\xc1\xc1",
    "other ids": wire.FRAME.pack(wire.LOAD, 8) + b"\x94\xc4\x00\xc4\x00\xc4\x00\x00",
}


def test_names_that_no_part_can_have(server, path):
    sound = (BLOCK.namespace, BLOCK.parent, BLOCK.ids)
    for names, group in [
        (sound, 2),
        (sound, -1),
        ((bytes(4097), BLOCK.parent, BLOCK.ids), 0),
        ((b"", bytes(31), BLOCK.ids), 0),
        ((b"", BLOCK.parent, BLOCK.ids * 2), 0),
    ]:
        with connected(path) as link:
            link.send(wire.LOAD, wire.pack_load(Block(*names), group))
            assert hung_up(link)


@pytest.mark.parametrize("question", HOSTILE_QUESTIONS.values(), ids=HOSTILE_QUESTIONS)
def test_a_hostile_question_ends_its_connection_and_no_other(server, disk, path, question):
    keep(disk, [BLOCK])
    with no_large_body(wire.LOAD_BYTES + wire.HAS_BYTES), asking(path) as tier:
        assert load(tier, BLOCK) == payload_of(BLOCK)
        with connected(path) as link:
            link.sock.sendall(question)
            assert hung_up(link)
        with connected(path, greet=False) as link:
            link.sock.sendall(question)
            link.sock.shutdown(socket.SHUT_WR)
            assert hung_up(link)
        assert load(tier, BLOCK) == payload_of(BLOCK)
        assert tier.stats().loads == {"loaded": 2}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=300), st.booleans())
def test_no_garbage_harms_the_server(server, disk, path, data, greet):
    keep(disk, [BLOCK])
    with connected(path, greet) as link, suppress(OSError):
        link.sock.sendall(data)
    with asking(path) as tier:
        assert load(tier, BLOCK) == payload_of(BLOCK)


def test_a_greeting_of_other_facts_is_answered_and_ended(server, path):
    with connected(path, greet=False) as link:
        link.send(wire.HELLO, replace(FACTS, numerics="n0").digest())
        assert link.head({wire.FOREIGN: 0}) == (wire.FOREIGN, 0)
        assert hung_up(link)


def test_a_question_that_does_not_end_is_not_waited_for(server, path, monkeypatch):
    monkeypatch.setattr(peer, "EXCHANGE_SECONDS", 0.2)
    with connected(path) as link:
        link.sock.sendall(wire.FRAME.pack(wire.LOAD, 100) + b"only this")
        assert hung_up(link)


def test_connections_are_bounded(server, disk, path, monkeypatch):
    monkeypatch.setattr(peer, "MAX_CONNECTIONS", 3)
    links = [socket.socket(socket.AF_UNIX) for _ in range(6)]
    try:
        for sock in links:
            sock.settimeout(10)
            sock.connect(os.fspath(path))
        assert [hung_up(Wire(sock)) for sock in links[3:]] == [True] * 3
        assert len(server._connections) == 3
    finally:
        for sock in links:
            sock.close()
    until(lambda: not server._connections)


class Stuck:
    """A tier whose loads never end."""

    facts = FACTS

    def __init__(self):
        self.cancelled = []

    def start_load(self, block, group=0):
        return 7

    def poll(self, ticket, timeout=0.0):
        time.sleep(timeout)
        return None

    def cancel(self, ticket):
        self.cancelled.append(ticket)


def test_a_tier_that_hangs_is_a_miss(path, monkeypatch):
    monkeypatch.setattr(peer, "LOAD_SECONDS", 0.1)
    stuck = Stuck()
    server = PeerServer(path, stuck)  # type: ignore[arg-type]
    with asking(path) as tier:
        assert load(tier, BLOCK) == "missing" and stuck.cancelled == [7]
    server.close()


# -- the socket ------------------------------------------------------------------------------------------------


def test_the_socket_is_of_this_user_alone(server, path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_open_to_others_is_refused_by_both(path, disk):
    path.parent.chmod(0o755)
    for make in (lambda: PeerServer(path, disk), lambda: PeerTier(path, FACTS)):
        with pytest.raises(ConfigError, match="open to others"):
            make()
    path.parent.chmod(0o700)
    server = PeerServer(path, disk)
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
def test_another_user_gets_nothing_even_through_an_open_door(disk):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder, "kv")
        server = PeerServer(path, disk)
        path.parent.chmod(0o711)
        path.chmod(0o666)
        ran = subprocess.run([sys.executable, "-c", STRANGER, path], capture_output=True, text=True, check=True)
        server.close()
    assert ran.stdout == "b''\n"


def test_the_socket_of_another_user_is_not_asked(server, disk, path, monkeypatch):
    keep(disk, [BLOCK])
    with asking(path) as tier:
        monkeypatch.setattr(wire, "of_this_user", lambda sock: False)
        assert load(tier, BLOCK) == "peer"


def test_the_socket_of_a_dead_server_is_replaced_and_of_a_living_one_is_not(server, path, disk, tmp_path):
    with pytest.raises(ConfigError, match="another engine"):
        PeerServer(path, disk)
    dead = path.with_name("dead")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.fspath(dead))
    second = PeerServer(dead, disk)
    second.close()
    assert not dead.exists()
    file = path.with_name("file")
    file.write_text("not ours")
    with pytest.raises(ConfigError, match="not a socket"):
        PeerServer(file, disk)
    assert file.read_text() == "not ours"
    for make in (lambda p: PeerServer(p, disk), lambda p: PeerTier(p, FACTS)):
        with pytest.raises(ConfigError, match="too long"):
            make(path.with_name("x" * 100))


def test_closing_ends_connections_and_leaves_no_descriptor(path, disk):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    keep(disk, [BLOCK])
    before = descriptors(), threading.active_count()
    server = PeerServer(path, disk)
    with asking(path) as tier:
        assert load(tier, BLOCK) == payload_of(BLOCK)
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 2
        assert load(tier, BLOCK) == "peer"
    until(lambda: (descriptors(), threading.active_count()) == before)
