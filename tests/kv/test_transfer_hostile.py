"""Exchanges of blocks: bounded memory and time, and sound parts for everybody else, however mad an end is."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvasir.kv.peers import wire
from kvasir.kv.transfer import acceptor, frames, inbox, link, outbox, stream
from kvasir.kv.transfer import exchange as exchanges
from kvasir.kv.transfer.block_socket import FRAME, BlockSocket, WireError
from kvasir.kv.transfer.exchange import BlockExchange
from kvasir.kv.transfer.frames import Hello, Part
from kvasir.kv.transfer.link import Greeting, Link, connect, parse_address
from kvasir.kv.transfer.security import Credentials
from kvasir.types import Transfer
from tests.examples import examples
from tests.kv._tiers import FACTS, blocks_of, load, payload_of, until
from tests.kv._transfer import exchange

BLOCK = blocks_of(1)[0]
PAYLOAD = payload_of(BLOCK)
LARGEST = frames.PART_HEAD.size + frames.NAME_BYTES + max(group.num_bytes for group in FACTS.groups)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(outbox, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(outbox, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(exchanges, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(exchanges, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(link, "GREETING_SECONDS", 2.0)


@pytest.fixture
def where(tmp_path) -> Path:
    (tmp_path / "run").mkdir(mode=0o700)
    return tmp_path / "run" / "blocks"


@pytest.fixture
def server(where) -> Iterator[BlockExchange]:
    with exchange(where) as found:
        yield found


@contextmanager
def stranger(server: BlockExchange) -> Iterator[BlockSocket]:
    """A connection that has not been greeted."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(server.address)
        found = BlockSocket(sock)
        found.begin(10.0)
        yield found


@contextmanager
def sender(server: BlockExchange) -> Iterator[Link]:
    """A greeted connection that may send parts."""
    greeting = Greeting(Credentials(), server._digest)
    found = connect(parse_address(server.address), greeting)
    found.begin(10.0)
    try:
        yield found
    finally:
        found.close()


def say(found: BlockSocket, data: bytes) -> None:
    """Sends all that the other end still takes, and then no more."""
    with suppress(OSError):
        found.sock.sendall(data)
        found.sock.shutdown(socket.SHUT_WR)


def assert_closed(found: BlockSocket) -> None:
    with pytest.raises((OSError, WireError)):
        while True:
            found.body(1)


def assert_sound(server: BlockExchange) -> None:
    """Another sender's parts arrive."""
    with exchange(None, server.address) as first:
        block = blocks_of(1, first=7000)[0]
        assert first.outbox.open(Transfer("sound", server.address))
        first.outbox.put("sound", block, 0, memoryview(payload_of(block)))
        first.outbox.finish("sound")
        until(lambda: not first.outbox.is_open("sound"))
        assert load(server.inbox, block) == payload_of(block)


def part(name: bytes, payload: bytes, check: int | None = None) -> bytes:
    check = frames.checksum(name, memoryview(payload)) if check is None else check
    body = frames.PART_HEAD.pack(check, len(name)) + name + payload
    return FRAME.pack(frames.PART, len(body)) + body


def slot(number: int, name: bytes) -> bytes:
    body = frames.SLOT_HEAD.pack(number, 0, len(name)) + name
    return FRAME.pack(frames.SLOT, len(body)) + body


def name_of(**changes) -> bytes:
    fields = {"transfer": "t", "namespace": BLOCK.namespace, "parent": BLOCK.parent, "ids": BLOCK.ids, "group": 0}
    return msgspec.msgpack.encode(list({**fields, **changes}.values()))


SOUND = Part("t", BLOCK, 0, memoryview(PAYLOAD)).name()
LIES = {
    "unknown kind": FRAME.pack(99, 4) + b"abcd",
    "kind of a tier": FRAME.pack(wire.HAS, 4) + b"abcd",
    "huge": FRAME.pack(frames.PART, 1 << 62),
    "longer than any part": FRAME.pack(frames.PART, LARGEST + 1),
    "no name": FRAME.pack(frames.PART, 2) + b"ab",
    "a name longer than the frame": FRAME.pack(frames.PART, 10) + frames.PART_HEAD.pack(0, 60000) + b"abcd",
    "a name of garbage": part(b"\xc1" * 30, PAYLOAD),
    "a name of another type": part(msgspec.msgpack.encode({"a": 1}), PAYLOAD),
    "another group": part(name_of(group=2), PAYLOAD),
    "a negative group": part(name_of(group=-1), PAYLOAD),
    "a long namespace": part(name_of(namespace=b"n" * 5000), PAYLOAD),
    "a short parent": part(name_of(parent=b"p"), PAYLOAD),
    "more ids": part(name_of(ids=BLOCK.ids * 2), PAYLOAD),
    "a long id": part(name_of(transfer="t" * 65), PAYLOAD),
    "a short payload": part(SOUND, PAYLOAD[:-1]),
    "a long payload": part(SOUND, PAYLOAD + b"x"),
    "a wrong checksum": part(SOUND, PAYLOAD, 5),
    "a slot without memory": slot(0, SOUND),
    "an id of garbage": FRAME.pack(frames.DONE, 2) + b"\xff\xff",
    "a long end": FRAME.pack(frames.DONE, 65) + b"x" * 65,
    "memory without a descriptor": FRAME.pack(frames.SHARE, frames.SHARED.size) + frames.SHARED.pack(96, 4),
    "cut off": part(SOUND, PAYLOAD)[:-1],
    "nothing": b"",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_false_frames_end_the_link_and_nothing_else(server, lie):
    with sender(server) as found:
        say(found, lie)
        assert_closed(found)
    assert server.inbox.stats().num_bytes == 0
    assert_sound(server)


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=300), st.sampled_from([frames.PART, frames.SLOT, frames.DONE, frames.SHARE, frames.HELLO, 0]))
def test_garbage_ends_the_link(server, data, kind):
    with sender(server) as found:
        say(found, FRAME.pack(kind, len(data)) + data)
        assert_closed(found)
    assert server.inbox.stats().num_bytes == 0


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=300), st.booleans())
def test_garbage_instead_of_a_greeting_ends_the_link(server, data, framed):
    with stranger(server) as found:
        say(found, FRAME.pack(frames.HELLO, len(data)) + data if framed else data)
        assert_closed(found)


@pytest.mark.parametrize(
    "hello",
    [
        Hello(frames.VERSION + 1, bytes(32), bytes(32), ""),
        Hello(frames.VERSION, bytes(32), b"short", ""),
        Hello(frames.VERSION, bytes(32), bytes(32), "x" * 65),
        Hello(frames.VERSION, bytes(32), bytes(32), "unknown"),
        Hello(frames.VERSION, b"", bytes(32), ""),
    ],
)
def test_false_greetings_get_nothing(server, hello):
    with stranger(server) as found:
        said = msgspec.msgpack.encode(hello)
        found.send(frames.HELLO, said)
        with suppress(OSError, WireError):
            nonce = bytes(found.body(found.head({frames.CHALLENGE: 64})[1]))[:32]
            found.send(frames.PROOF, Credentials().proof(b"client", said, nonce))
            assert found.head({frames.REFUSAL: 100})[0] == frames.REFUSAL
    assert_sound(server)


@pytest.mark.parametrize("said", [b"denied\nINFO forged", b"\x1b[2J", b"", b"other", b"\xff"])
def test_a_refusal_for_an_unknown_reason_is_an_invalid_frame(where, said):
    """Reasons are logged."""

    def refuse(found: BlockSocket) -> None:
        found.send(frames.REFUSAL, said)

    with hostile(where, refuse, greets=False), pytest.raises(WireError):
        connect(parse_address(str(where)), Greeting(Credentials(), lambda: b"digest"))


def test_a_proof_for_another_challenge_is_none(where):
    with exchange(where, credentials=Credentials(b"the key of all engines")) as server:
        greeting = Greeting(Credentials(b"another key than theirs"), server._digest)
        with pytest.raises(WireError, match="another key"):
            connect(parse_address(server.address), greeting)
        with stranger(server) as found:
            said = msgspec.msgpack.encode(Hello(frames.VERSION, server._digest() or b"", bytes(32), ""))
            found.send(frames.HELLO, said)
            found.body(found.head({frames.CHALLENGE: 64})[1])
            found.send(frames.PROOF, bytes(32))
            assert found.body(found.head({frames.REFUSAL: 100})[1]) == b"denied"


def test_memory_that_is_not_what_it_says_ends_the_link(server):
    """Memory that is too short or may become shorter, a pipe, a file that cannot be read: none harms the receiver."""
    largest = max(group.num_bytes for group in FACTS.groups)
    size = frames.WINDOW * largest
    read, write = os.pipe()
    short, loose = (os.memfd_create(name, os.MFD_ALLOW_SEALING) for name in ("short", "loose"))
    os.ftruncate(short, size - 1)
    os.ftruncate(loose, size)
    fcntl.fcntl(short, fcntl.F_ADD_SEALS, stream.SEALS)
    unreadable = os.open(os.devnull, os.O_WRONLY)
    sound = stream.Slots(largest).fd
    pairs = [(fd, (largest, frames.WINDOW)) for fd in (read, short, loose, unreadable)]
    pairs += [(sound, given) for given in ((1 << 63, 1 << 31), (largest, 5), (size, 1), (0, 4))]
    try:
        for fd, given in pairs:
            with sender(server) as found:
                head = FRAME.pack(frames.SHARE, frames.SHARED.size) + frames.SHARED.pack(*given)
                socket.send_fds(found.sock, [head], [fd, fd, fd])
                say(found, slot(3, SOUND))
                assert_closed(found)
    finally:
        for fd in (read, write, short, loose, unreadable, sound):
            os.close(fd)
    assert_sound(server)


def test_slots_that_there_are_not_end_the_link(server):
    largest = max(group.num_bytes for group in FACTS.groups)
    slots = stream.Slots(largest)
    for number in (frames.WINDOW, 1 << 31):
        with sender(server) as found:
            head = FRAME.pack(frames.SHARE, frames.SHARED.size) + frames.SHARED.pack(largest, frames.WINDOW)
            socket.send_fds(found.sock, [head], [slots.fd])
            say(found, slot(number, SOUND))
            assert_closed(found)
    slots.close()
    assert_sound(server)


def test_descriptors_of_broken_links_are_closed(server):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    assert_sound(server)
    before = descriptors()
    for _ in range(20):
        with sender(server) as found, suppress(OSError):
            memory = os.memfd_create("shared")
            head = FRAME.pack(frames.SHARE, frames.SHARED.size) + frames.SHARED.pack(96, 4)
            socket.send_fds(found.sock, [head], [memory])
            os.close(memory)
    until(lambda: descriptors() <= before)


def test_many_silent_connections_keep_nobody_out_for_long(server, monkeypatch):
    monkeypatch.setattr(link, "GREETING_SECONDS", 0.2)
    monkeypatch.setattr(acceptor, "MAX_CONNECTIONS", 4)
    socks = [socket.socket(socket.AF_UNIX) for _ in range(12)]
    try:
        for sock in socks:
            sock.connect(server.address)
        assert_sound(server)
    finally:
        for sock in socks:
            sock.close()


# -- a server that is mad ----------------------------------------------------------------------------------------


@contextmanager
def hostile(where: Path, behave: Callable[[BlockSocket], None], greets: bool = True) -> Iterator[None]:
    """Greets everybody as one who has the key, then does what `behave` says. greets: False: only hears the
    greeting before it."""
    done = threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(where))
    listener.listen()
    listener.settimeout(0.02)

    def talk(sock: socket.socket) -> None:
        found = BlockSocket(sock)
        found.begin(10.0)
        with suppress(OSError, WireError):
            said = bytes(found.body(found.head({frames.HELLO: 1000})[1]))
            if greets:
                found.send(frames.CHALLENGE, bytes(32), Credentials().proof(b"server", said, bytes(32)))
                found.body(found.head({frames.PROOF: 32})[1])
                found.send(frames.WELCOME)
            behave(found)
        found.close()

    def accept() -> None:
        while not done.is_set():
            with suppress(TimeoutError):
                talk(listener.accept()[0])

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield
    finally:
        done.set()
        acceptor.join()
        listener.close()


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_what_a_mad_sender_sends_is_not_kept(where, lie, monkeypatch):
    monkeypatch.setattr(inbox, "STALL_SECONDS", 0.3)
    with hostile(where, lambda found: found.sock.sendall(lie)), exchange(None, where) as second:
        second.expect(Transfer("t", str(where), 5.0))
        until(lambda: second.inbox.settled("t"))
        assert second.inbox.stats().num_bytes == 0


@pytest.mark.parametrize(
    "lie",
    [FRAME.pack(frames.TAKEN, 1) + b"x", FRAME.pack(frames.TAKEN, 0), FRAME.pack(frames.DONE, 1) + b"t", b"", b"\x09"],
)
def test_what_a_mad_receiver_says_is_not_believed(where, lie):
    def behave(found: BlockSocket) -> None:
        found.sock.recv(10)
        found.sock.sendall(lie)

    with hostile(where, behave), exchange(None, where) as first:
        assert first.outbox.open(Transfer("t", str(where), 0.2))
        first.outbox.put("t", BLOCK, 0, memoryview(PAYLOAD))
        first.outbox.finish("t")
        until(lambda: not first.outbox.is_open("t"))
        assert first.outbox.num_bytes == 0 and first.outbox.stats.bytes_sent == 0


def test_a_receiver_that_never_answers_delays_nobody(where, monkeypatch):
    monkeypatch.setattr(stream, "EXCHANGE_SECONDS", 0.2)
    ended = threading.Event()

    def behave(found: BlockSocket) -> None:
        ended.wait(20)

    with hostile(where, behave), exchange(None, where) as first:
        begun = time.monotonic()
        for i in range(50):
            assert first.outbox.open(Transfer(str(i), str(where), 1.0))
            first.outbox.put(str(i), BLOCK, 0, memoryview(PAYLOAD))
        assert time.monotonic() - begun < 10
        until(lambda: first.outbox.room == 1 << 20)
        ended.set()
