"""Targets: what another engine can send to kv.transfer: parts, answers to parts, and greetings at either end.

An input of a receiver is a byte of choices (CHOICES) and the frames. The other end of its link is in this process, and
has sent everything before the first read: nothing waits.
"""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from random import Random

import msgspec

from kvasir.kv.tiers.block import StoredBlock
from kvasir.kv.transfer import frames, link
from kvasir.kv.transfer.block_socket import FRAME, WireError
from kvasir.kv.transfer.frames import Hello, Part
from kvasir.kv.transfer.inbox import Inbox
from kvasir.kv.transfer.link import Greeting, Link, Refused
from kvasir.kv.transfer.security import Credentials
from kvasir.kv.transfer.stream import PartReceiver, PartSender, Slots
from tests.fuzz.target import Target
from tests.fuzz.transfer_model import HEADS, LARGEST, Body, Model, framed, split
from tests.kv._tiers import FACTS, blocks_of, load, payload_of

REPAIRS, LOCAL, TIGHT, UNTIL, UNSEALED, SHORT, NOTHING = (1 << bit for bit in range(7))  # choices
AMPLE_BYTES, TIGHT_BYTES = 1 << 20, 200
MOST = frames.PART_HEAD.size + frames.SPAN.size + frames.NAME_BYTES + LARGEST  # bytes of a body
DAYS = 1e6  # seconds: what waits is found by the fuzzer's own limit, not by a deadline
BLOCKS = blocks_of(3)


class WatchedLink(Link):
    """A link whose other end is `other`, which takes what is sent at once."""

    def __init__(self, sock: socket.socket, other: socket.socket, local: bool):
        super().__init__(sock)
        self.local, self.other, self.heard = local, other, b""
        self.begin(0)

    def begin(self, seconds: float) -> None:
        self.deadline = time.monotonic() + DAYS

    def body(self, length: int) -> bytearray:
        assert length <= MOST, "memory beyond the longest frame"
        return super().body(length)

    def send(self, kind: int, *parts: bytes | memoryview) -> None:
        super().send(kind, *parts)
        self.heard += self.other.recv(FRAME.size + sum(len(part) for part in parts), socket.MSG_WAITALL)


class WatchedInbox(Inbox):
    """An inbox whose bound and whose count of bytes are checked after every message."""

    def keep(self, transfer: str, block: StoredBlock, group: int, payload: memoryview) -> bool:
        assert FACTS.admits(block, group) and len(transfer) <= frames.MAX_ID and payload.readonly
        answer = super().keep(transfer, block, group, payload)
        self._check()
        return answer

    def piece(self, transfer: str, block: StoredBlock, group: int, offset: int, payload: memoryview, crc: int) -> int:
        answer = super().piece(transfer, block, group, offset, payload, crc)
        self._check()
        return answer

    def seal(self, transfer: str, block: StoredBlock, group: int, check: int) -> int:
        answer = super().seal(transfer, block, group, check)
        self._check()
        return answer

    def done(self, transfer: str) -> None:
        super().done(transfer)
        self._check()

    def _check(self) -> None:
        held = sum(part[2].nbytes for part in self._parts.values())
        growing = [one.num_bytes for incoming in self._incoming.values() for one in incoming.growing.values()]
        assert not any(incoming.ended and incoming.growing for incoming in self._incoming.values())
        assert held + sum(growing) == self._num_bytes <= self._max_bytes


@contextmanager
def linked(local: bool) -> Iterator[WatchedLink]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield WatchedLink(ours, theirs, local)


# --- parts ------------------------------------------------------------------------------------------


def read_parts(data: bytes) -> None:
    """The receiver answers, keeps and hands out what the model says, and nothing after a bad frame."""
    choices, sent = data[0] if data else 0, data[1:]
    fd = memory_of(choices)
    sound, ample = fd is not None and not choices & (UNSEALED | SHORT), not choices & TIGHT
    model = Model(
        sent, bool(choices & LOCAL), recorded(True)[1] if fd is not None else None, sound,
        bool(choices & REPAIRS), ample, "b" if choices & UNTIL else "?",
    )  # fmt: skip
    model.run()
    inbox = WatchedInbox(FACTS, AMPLE_BYTES if ample else TIGHT_BYTES)
    holders = held(fd)
    with linked(model.local) as ours:
        if model.sent:
            socket.send_fds(ours.other, [model.sent], [fd] if fd is not None else [])
        ours.other.shutdown(socket.SHUT_WR)
        complete = False
        with suppress(WireError):
            PartReceiver(ours, FACTS, inbox).run(lambda transfer: transfer == model.until)
            complete = True
        heard = ours.heard
    assert held(fd) == holders, "a descriptor was not closed"
    if ample:
        assert heard == b"".join(framed(frames.TAKEN, bytes((answer,))) for answer in model.heard)
        assert complete == model.complete
        assert inbox.stats().num_parts == len(model.parts)
        for (_, group), (block, payload) in model.parts.items():
            assert load(inbox, block, group) == payload
    for name, (_, block, payload) in list(inbox._parts.items()):
        assert set(enumerate(payload)) <= model.claims[name], "bytes that no good frame has"
        assert load(inbox, block, name[1]) == bytes(payload)
    for transfer in list(inbox._incoming):
        inbox.forget(transfer)
    assert inbox.stats().num_bytes == 0


def memory_of(choices: int) -> int | None:
    """A descriptor that comes with the frames: of slots as a sender makes them, or of others."""
    if not choices & LOCAL or choices & NOTHING or not hasattr(os, "memfd_create"):
        return None
    return memories()[0 if not choices & (UNSEALED | SHORT) else 1 if choices & UNSEALED else 2]


@cache
def memories() -> tuple[int, int, int]:
    """Descriptors of slots with what a sender has written, of memory that can become shorter, and of too little."""
    sound, loose, short = Slots(LARGEST).fd, os.memfd_create("loose"), Slots(LARGEST - 1).fd
    os.ftruncate(loose, frames.WINDOW * LARGEST)
    for fd in (sound, loose):
        os.pwrite(fd, recorded(True)[1], 0)
    return sound, loose, short


def held(fd: int | None) -> int:
    """How many descriptors of this process are of the same file."""
    if fd is None:
        return 0
    wanted, count = os.fstat(fd), 0
    for other in map(int, os.listdir("/proc/self/fd")):
        try:
            found = os.fstat(other)
        except OSError:  # that of the listing
            continue
        count += os.path.samestat(found, wanted)
    return count


# --- what a sender sends ----------------------------------------------------------------------------


@dataclass
class Grown:
    check: int


def parts_of(transfer: str) -> list[Part]:
    """Two whole parts, one in two pieces, and the end."""
    first, second = BLOCKS[:2]
    pieces = [(0, memoryview(payload_of(second))[:40]), (40, memoryview(payload_of(second))[40:])]
    crcs = [zlib.crc32(payload) for _, payload in pieces]
    grown = Grown(frames.checksum_of_pieces((at, p.nbytes, crc) for (at, p), crc in zip(pieces, crcs, strict=True)))
    return [
        *(Part(transfer, first, group, memoryview(payload_of(first, group))) for group in (0, 1)),
        *(Part(transfer, second, 0, p, at, grown, crc) for (at, p), crc in zip(pieces, crcs, strict=True)),
        Part(transfer, second, 0, grown=grown),
        Part(transfer),
    ]


@cache
def recorded(local: bool, transfer: str = "a") -> tuple[bytes, bytes]:
    """The frames that a sender sends, and what is then in the memory that it shares."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        own = Link(ours)
        own.local = local
        sender = PartSender(own, FACTS)
        for part in parts_of(transfer):
            sender.send(part)
        own.shut()
        sent, found, _, _ = socket.recv_fds(theirs, 1 << 16, 1)
        while more := theirs.recv(1 << 16):
            sent += more
        memory = os.pread(found[0], frames.WINDOW * LARGEST, 0) if found else b""
        for fd in found:
            os.close(fd)
        sender.close()
    return sent, memory


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Frames go, come twice, change their places or their fields; lengths are made right."""
    import atheris

    random = Random(seed)
    found, rest = split(data[1:])
    if not found or random.random() < 0.2:
        return atheris.Mutate(data, max_size)
    choices = data[0] ^ (1 << random.randrange(8) if random.random() < 0.1 else 0)
    for _ in range(random.choice((1, 1, 2, 4))):
        _change(found, random, atheris.Mutate)
    rest = b"" if random.random() < 0.5 else rest
    return (bytes((choices,)) + b"".join(framed(*frame) for frame in found) + rest)[:max_size]


def _change(found: list[tuple[int, bytes]], random: Random, change: Callable[[bytes, int], bytes]) -> None:
    at, what = random.randrange(len(found)), random.randrange(8)
    kind, body = found[at]
    if what == 0 and len(found) > 1:
        del found[at]
    elif what == 1:
        found.insert(random.randrange(len(found) + 1), found[at])
    elif what == 2:
        other = random.randrange(len(found))
        found[at], found[other] = found[other], found[at]
    elif what == 3:
        found[at] = random.choice((kind + 1, kind - 1, *HEADS, frames.SHARE, frames.DONE)) & 255, body
    elif kind in HEADS and (read := Body.of(kind, body)):
        _change_part(read, random, change)
        found[at] = kind, read.packed()
    else:
        found[at] = kind, change(body, len(body) + 8)


NUMBERS = (0, 1, 2, 3, 4, 8, 39, 40, 41, 56, 95, 96, 97, (1 << 32) - 1)


def _change_part(read: Body, random: Random, change: Callable[[bytes, int], bytes]) -> None:
    what = random.randrange(5)
    if what == 0:
        read.head[random.randrange(len(read.head))] = random.choice(NUMBERS)
    elif what == 1 and read.span:
        read.span = random.choice((read.span[0], *NUMBERS, (1 << 64) - 1)), random.choice((read.span[1], *NUMBERS))
        if read.rest:
            read.rest = (payload_of(BLOCKS[1]) + read.rest)[read.span[0] :][: read.span[1]]
    elif what == 2:
        read.rest = change(read.rest, len(read.rest) + 1)
    else:
        read.name = _changed_name(read.name, random, change)


def _changed_name(name: bytes, random: Random, change: Callable[[bytes, int], bytes]) -> bytes:
    """Another transfer, block or group, or other bytes."""
    fields = None
    with suppress(msgspec.DecodeError, ValueError):
        fields = msgspec.msgpack.decode(name)
    if not isinstance(fields, list) or len(fields) != 5 or random.random() < 0.2:
        return change(name, len(name) + 2)[: 1 << 15]
    what = random.randrange(4)
    if what == 0:
        fields[0] = random.choice(("a", "b", "c", "", "ä" * 64, "x" * 65))
    elif what == 1:
        fields[4] = random.choice((0, 1, 2, -1, 1 << 40, None))
    elif what == 2:
        fields[2:4] = [random.choice(BLOCKS).parent, random.choice(BLOCKS).ids]
    else:
        at = random.randrange(1, 4)
        fields[at] = change(fields[at], len(fields[at]) + 1) if isinstance(fields[at], bytes) else b""
    return msgspec.msgpack.encode(fields)


# --- answers ----------------------------------------------------------------------------------------


def read_answers(data: bytes) -> None:
    """The sender believes an answer that its part can have, in the order of the parts, and ends at any other."""
    parts = parts_of("a")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = PartSender(WatchedLink(ours, theirs, False), FACTS)
        for part in parts:
            sender.send(part)
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        for part in parts:
            found, answer = sender.acknowledged()
            assert found is part and answer in (frames.DROPPED, frames.KEPT, *[frames.INCOMPLETE] * part.seals)
        assert not sender.under_way


# --- greetings --------------------------------------------------------------------------------------

SERVES, HAS_KEY = 1, 2  # choices
KNOWN = Credentials(b"the key of all engines")
DIGEST = FACTS.digest()


class GreetedLink(WatchedLink):
    """The other end says `said`. If it has the key, it proves so when it is asked."""

    def __init__(self, sock: socket.socket, other: socket.socket, said: bytes, choices: int):
        super().__init__(sock, other, False)
        self.said, self.serves, self.has_key = said, bool(choices & SERVES), bool(choices & HAS_KEY)
        found, _ = split(said)
        if self.serves and self.has_key and found:
            self.said = framed(*found[0])
            other.sendall(self.said)
        elif self.serves:
            self._last(said)

    def _last(self, data: bytes) -> None:
        self.other.sendall(data)
        self.other.shutdown(socket.SHUT_WR)

    def send(self, kind: int, *parts: bytes | memoryview) -> None:
        super().send(kind, *parts)
        body = b"".join(parts)
        if kind == frames.CHALLENGE and self.has_key:
            self._last(framed(frames.PROOF, KNOWN.proof(b"client", self.said[FRAME.size :], body[:32])))
        elif kind == frames.HELLO:
            proof = bytes(32) + KNOWN.proof(b"server", body, bytes(32))
            self._last((framed(frames.CHALLENGE, proof) if self.has_key else b"") + self.said)


def read_greeting(data: bytes) -> None:
    """Only an end with the key and the same facts becomes a link, and is told no more than why it does not."""
    choices, said = data[0] if data else 0, data[1:4096]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = GreetedLink(ours, theirs, said, choices)
        try:
            if found.serves:
                wants = link._answer(found, Greeting(KNOWN, lambda: DIGEST, lambda transfer: transfer == "held"))
                hello = frames.read_hello(split(said)[0][0][1])
                assert found.has_key and hello.digest == DIGEST and wants == hello.wants and wants in ("", "held")
            else:
                link._introduce(found, KNOWN, Hello(frames.VERSION, DIGEST, bytes(32), ""))
                assert found.has_key and said.startswith(framed(frames.WELCOME, b""))
        except Refused as refused:
            assert refused.reason in frames.REASONS


def read_hello(data: bytes) -> None:
    """What is a greeting says the same when it is said again, within its bounds."""
    hello = frames.read_hello(data)
    assert hello.version == frames.VERSION and len(hello.nonce) == 32 and len(hello.wants) <= frames.MAX_ID
    assert frames.read_hello(msgspec.msgpack.encode(hello)) == hello


TARGETS = {
    "transfer_parts": Target(
        read_parts, refusals=(), mutate=mutate, words=tuple(bytes((k,)) for k in (*HEADS, 25, 28))
    ),
    "transfer_answers": Target(read_answers, refusals=(WireError,)),
    "transfer_greeting": Target(read_greeting, refusals=(WireError,)),
    "transfer_hello": Target(read_hello, refusals=(WireError,)),
}
