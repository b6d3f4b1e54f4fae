"""PeerTier and PeerServer: a miss in bounded time and memory, however mad the other end is."""

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvasir.kv.peers import server as peer_server
from kvasir.kv.peers import tier as peer_tier
from kvasir.kv.peers import wire
from kvasir.kv.peers.server import PeerServer
from kvasir.kv.tiers import record
from kvasir.kv.tiers.block import StoredBlock, StoreFacts
from kvasir.kv.transfer import acceptor, frames
from kvasir.kv.transfer import link as transfer_link
from kvasir.kv.transfer.block_socket import FRAME, BlockSocket, WireError
from kvasir.kv.transfer.link import Address, Link, Refused, _introduce
from kvasir.kv.transfer.security import NO_CREDENTIALS
from tests.examples import examples
from tests.kv._peer import BLOCK, asking, hostile, keep, no_large_body
from tests.kv._tiers import FACTS, blocks_of, load, payload_of, until

pytestmark = pytest.mark.usefixtures("hurry")

# -- a server that is dead, slow or out of its mind -------------------------------------------------------------


SEALED = record.seal(FACTS, BLOCK, 0, memoryview(payload_of(BLOCK))) + payload_of(BLOCK)


def question(link: BlockSocket) -> None:
    _, length = link.head({wire.HAS: wire.HAS_BYTES, wire.LOAD: wire.LOAD_BYTES})
    link.body(length)


@pytest.mark.parametrize("greet", [True, False])
def test_a_silent_peer_is_a_miss_in_time(path, monkeypatch, greet):
    monkeypatch.setattr(wire, "EXCHANGE_SECONDS", 0.3)
    monkeypatch.setattr(transfer_link, "GREETING_SECONDS", 0.3)
    ended = threading.Event()
    with hostile(path, lambda link: ended.wait(10) and None, greet), asking(path) as tier:
        begin = time.monotonic()
        assert load(tier, BLOCK) == "peer"
        assert 0.2 < time.monotonic() - begin < 8
        ended.set()


def test_a_peer_that_drips_is_a_miss_in_time(path, monkeypatch):
    """Each byte arrives long before the timeout of one read; the whole message does not."""
    monkeypatch.setattr(wire, "EXCHANGE_SECONDS", 0.4)

    def drip(link: BlockSocket) -> None:
        question(link)
        for byte in FRAME.pack(wire.RECORD, len(SEALED)) + SEALED:
            link.sock.sendall(bytes([byte]))
            time.sleep(0.02)

    with hostile(path, drip), asking(path) as tier:
        begin = time.monotonic()
        assert load(tier, BLOCK) == "peer"
        assert time.monotonic() - begin < 5


def test_after_a_failure_the_peer_is_not_asked_for_a_while(path, monkeypatch):
    monkeypatch.setattr(peer_tier, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(peer_tier, "LONGEST_PAUSE", 60.0)
    seen = []
    with hostile(path, seen.append), asking(path) as tier:
        assert [load(tier, BLOCK) for _ in range(20)] == ["peer"] * 20
        assert len(seen) == 1


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "kvasir.kv")
    monkeypatch.setattr(peer_tier, "FIRST_PAUSE", 1e-9)
    lives = []

    def dies_twice(link):
        lives.append(link)
        question(link)
        if len(lives) > 2:
            link.send(wire.MISS)

    with hostile(path, dies_twice), asking(path) as tier:
        assert [load(tier, BLOCK) for _ in range(3)] == ["peer", "peer", "missing"]
    assert [record.message for record in caplog.records] == [
        f"no prefixes from {path} for now, they are computed: the peer has disconnected",
        f"prefixes come from {path} again",
    ]


def test_closing_does_not_wait_for_a_silent_peer(path, monkeypatch):
    monkeypatch.setattr(wire, "EXCHANGE_SECONDS", 120.0)
    asked, ended = threading.Event(), threading.Event()

    def silent(link: BlockSocket) -> None:
        question(link)
        asked.set()
        ended.wait(120)

    with hostile(path, silent):
        try:
            with asking(path) as tier:
                ticket = tier.start_load(BLOCK)
                assert asked.wait(20)
                tier.cancel(ticket)
            until(lambda: not any(thread.name == "kv-peer-load" for thread in threading.enumerate()))
        finally:
            ended.set()


LIES = {
    "longer than any record": FRAME.pack(wire.RECORD, record.max_size(FACTS, 0) + 1),
    "huge": FRAME.pack(wire.RECORD, 1 << 62),
    "unknown kind": FRAME.pack(99, 4) + b"abcd",
    "an answer to another question": FRAME.pack(wire.HELD, 1) + b"\x01",
    "a miss with a body": FRAME.pack(wire.MISS, 1) + b"x",
    "an empty record": FRAME.pack(wire.RECORD, 0),
    "cut off": FRAME.pack(wire.RECORD, len(SEALED)) + SEALED[:-1],
    "half a frame's head": b"\x07\x01",
    "nothing": b"",
    "shorter frame": FRAME.pack(wire.RECORD, len(SEALED) - 1) + SEALED,
    "longer frame": FRAME.pack(wire.RECORD, len(SEALED) + 1) + SEALED + b"x",
    "flipped payload": FRAME.pack(wire.RECORD, len(SEALED)) + SEALED[:-1] + bytes([SEALED[-1] ^ 1]),
    "huge sizes in the record": FRAME.pack(wire.RECORD, record.PREFIX.size)
    + record.PREFIX.pack(record.MAGIC, record.FORMAT, 1 << 31, 1 << 62, bytes(32)),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_false_answers_of_a_peer_are_rejected(path, lie):
    def answer(link: BlockSocket) -> None:
        question(link)
        link.sock.sendall(lie)

    with no_large_body(record.max_size(FACTS, 0)), hostile(path, answer), asking(path) as tier:
        assert load(tier, BLOCK) in ("peer", "truncated", "corrupt")


def test_a_sound_record_of_another_block_is_foreign(path):
    other = blocks_of(1)[0]
    data = record.seal(FACTS, other, 0, memoryview(payload_of(other))) + payload_of(other)

    def answer(link: BlockSocket) -> None:
        question(link)
        link.send(wire.RECORD, data)

    with hostile(path, answer), asking(path) as tier:
        assert load(tier, BLOCK) == "foreign"


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=200), st.sampled_from([wire.RECORD, wire.MISS, wire.HELD, frames.WELCOME, 0]))
def test_garbage_of_a_peer_is_rejected(path, data, kind):
    def answer(link: BlockSocket) -> None:
        question(link)
        link.send(kind, data)

    with hostile(path, answer), asking(path) as tier:
        reason = "missing" if kind == wire.MISS and not data else None
        assert load(tier, BLOCK) in ((reason,) if reason else ("peer", "truncated", "corrupt"))
        assert tier.ask([BLOCK.key], 0, 10.0)
        assert tier.has([BLOCK.key]) == (kind == wire.HELD and data == b"\x01")


@pytest.mark.parametrize("reply", [b"", b"\x01", b"\x01" * 2, b"\x01" * 4, b"\x01\x01\x02"])
def test_a_response_for_other_keys_is_ignored(path, reply):
    def answer(link: BlockSocket) -> None:
        question(link)
        link.send(wire.HELD, reply)

    keys = [b.key for b in blocks_of(3)]
    with hostile(path, answer), asking(path) as tier:
        assert tier.ask(keys, 0, 10.0) and tier.has(keys) == 0


# -- an engine that asks and is out of its mind ------------------------------------------------------------------


def greet_server(link: Link) -> None:
    link.begin(10)
    _introduce(link, NO_CREDENTIALS, hello())


def hello(facts: StoreFacts = FACTS) -> frames.Hello:
    return frames.Hello(frames.VERSION, facts.digest(), bytes(32), wire.WANTS)


@contextmanager
def connected(path: Path, greet: bool = True) -> Iterator[Link]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(os.fspath(path))
        link = Link(sock)
        link.begin(10)
        if greet:
            greet_server(link)
        yield link


def admits(path: Path) -> bool:
    with suppress(OSError, WireError), connected(path):
        return True
    return False


def hung_up(link: BlockSocket) -> bool:
    """Whether the server ends the connection without an answer."""
    link.sock.settimeout(10)
    try:
        return link.sock.recv(1) == b""
    except ConnectionResetError:
        return True


HOSTILE_QUESTIONS = {
    "garbage": bytes(range(200)),
    "a huge frame": FRAME.pack(wire.LOAD, 1 << 62),
    "too many keys": FRAME.pack(wire.HAS, wire.HAS_BYTES + 1),
    "too long a name": FRAME.pack(wire.LOAD, wire.LOAD_BYTES + 1),
    "an answer": FRAME.pack(frames.WELCOME, 0),
    "half a key": FRAME.pack(wire.HAS, 20) + bytes(20),
    "no group": FRAME.pack(wire.HAS, 0),
    "a group that is not there": FRAME.pack(wire.HAS, 36) + struct.pack("<I", 2) + bytes(32),
    "no msgpack": FRAME.pack(wire.LOAD, 3) + b"\xc1\xc1\xc1",
    "other ids": FRAME.pack(wire.LOAD, 8) + b"\x94\xc4\x00\xc4\x00\xc4\x00\x00",
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
            link.send(wire.LOAD, wire.pack_load(StoredBlock(*names), group))
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


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=300), st.booleans())
def test_garbage_does_not_affect_the_server(server, disk, path, data, greet):
    keep(disk, [BLOCK])
    with connected(path, greet) as link, suppress(OSError):
        link.sock.sendall(data)
    with asking(path) as tier:
        assert load(tier, BLOCK) == payload_of(BLOCK)


def test_a_greeting_of_other_facts_is_answered_and_ended(server, path):
    with connected(path, greet=False) as link:
        with pytest.raises(Refused, match="foreign"):
            _introduce(link, NO_CREDENTIALS, hello(replace(FACTS, numerics="n0")))
        assert hung_up(link)


def test_a_question_that_does_not_end_is_not_waited_for(server, path, monkeypatch):
    monkeypatch.setattr(wire, "EXCHANGE_SECONDS", 0.2)
    with connected(path) as link:
        link.sock.sendall(FRAME.pack(wire.LOAD, 100) + b"only this")
        assert hung_up(link)


def test_connections_are_bounded(server, disk, path, monkeypatch):
    monkeypatch.setattr(acceptor, "MAX_CONNECTIONS", 3)
    links = [socket.socket(socket.AF_UNIX) for _ in range(6)]
    try:
        for sock in links:
            sock.settimeout(10)
            sock.connect(os.fspath(path))
        assert [hung_up(BlockSocket(sock)) for sock in links[3:]] == [True] * 3
        for sock in links[:3]:
            greet_server(Link(sock))
    finally:
        for sock in links:
            sock.close()
    until(lambda: admits(path))


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
    monkeypatch.setattr(peer_server, "LOAD_SECONDS", 0.1)
    stuck = Stuck()
    server = PeerServer(Address(path), stuck)  # type: ignore[arg-type]
    with asking(path) as tier:
        assert load(tier, BLOCK) == "missing" and stuck.cancelled == [7]
    server.close()
