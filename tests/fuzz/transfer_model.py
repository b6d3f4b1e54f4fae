"""A plain model of the engine that takes parts (kv.transfer): what a stream of frames must lead to.

It has the whole stream at once, remembers pieces by their offsets, and knows no sockets, threads or bounds of memory.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from itertools import pairwise

from kvasir.kv.tiers.block import Name, StoredBlock
from kvasir.kv.transfer import frames
from kvasir.kv.transfer.block_socket import FRAME, WireError
from tests.kv._tiers import FACTS

LARGEST = max(group.num_bytes for group in FACTS.groups)
SLOTTED, PIECES = (frames.SLOT, frames.SLICE), (frames.PIECE, frames.SLICE)
HEADS = dict.fromkeys((frames.PART, frames.PIECE, frames.SEAL), frames.PART_HEAD) | dict.fromkeys(
    SLOTTED, frames.SLOT_HEAD
)


def split(stream: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """The complete frames of a stream, as kind and body, and what is left."""
    found, at = [], 0
    while len(stream) - at >= FRAME.size:
        kind, length = FRAME.unpack_from(stream, at)
        first, last = at + FRAME.size, at + FRAME.size + length
        if last > len(stream):
            break
        found.append((kind, stream[first:last]))
        at = last
    return found, stream[at:]


def framed(kind: int, body: bytes) -> bytes:
    return FRAME.pack(kind, len(body)) + body


@dataclass
class Body:
    """The fields of a frame of parts: head without the bytes of the name, which are known; span of pieces."""

    kind: int
    head: list[int]
    span: tuple[int, int] | None
    name: bytes
    rest: bytes

    @staticmethod
    def of(kind: int, body: bytes) -> Body | None:
        """None if the fields do not fit into the body."""
        head = HEADS[kind]
        at = head.size + frames.SPAN.size * (kind in PIECES)
        if len(body) < at:
            return None
        *numbers, name_bytes = head.unpack_from(body)
        if len(body) < at + name_bytes:
            return None
        span = frames.SPAN.unpack_from(body, head.size) if kind in PIECES else None
        return Body(kind, numbers, span, body[at : at + name_bytes], body[at + name_bytes :])

    def packed(self) -> bytes:
        head = HEADS[self.kind].pack(*self.head, len(self.name))
        return head + (frames.SPAN.pack(*self.span) if self.span else b"") + self.name + self.rest


@dataclass
class Model:
    """`run` goes through the frames of `sent` up to the first one that is not good. memory: what lies in the slots that
    come with the frames. sound: whether they may be shared. repairs: checksums but 0 are made right first. ample:
    the receiver has room for all parts; otherwise only `claims` is of use. until: the transfer whose end ends the link.

    heard: the answers. parts: those that can be loaded. claims: (position, byte) of every part in good frames. sent:
    the stream with repaired checksums."""

    sent: bytes
    local: bool
    memory: bytes | None
    sound: bool
    repairs: bool
    ample: bool
    until: str
    heard: bytearray = field(default_factory=bytearray)
    parts: dict[Name, tuple[StoredBlock, bytes]] = field(default_factory=dict)
    claims: dict[Name, set[tuple[int, int]]] = field(default_factory=dict)
    complete: bool = False  # whether the link ended with the transfer `until`
    _ended: set[str] = field(default_factory=set)
    _pieces: dict[tuple[str, Name], dict[int, bytes]] = field(default_factory=dict)
    _shares: bool = False

    def run(self) -> None:
        found, rest = split(self.sent)
        for i, (kind, body) in enumerate(found):
            answer, body = self._frame(kind, body, i == 0)
            found[i] = kind, body
            if answer is None:
                break
            self.heard += bytes(answer)
            if self.complete:
                break
        self.sent = b"".join(framed(*frame) for frame in found) + rest

    def _frame(self, kind: int, body: bytes, first: bool) -> tuple[tuple[int, ...] | None, bytes]:
        """The answers to a frame, None if it is not good; and its body with the right checksum."""
        if kind == frames.SHARE:
            self._shares = first and self.local and self.sound and body == frames.SHARED.pack(LARGEST, frames.WINDOW)
            return () if self._shares else None, body
        if kind == frames.DONE:
            return self._done(body), body
        if kind not in HEADS or (read := Body.of(kind, body)) is None:
            return None, body
        answer = self._part(read)
        return answer, read.packed()

    def _done(self, body: bytes) -> tuple[int, ...] | None:
        if len(body) > frames.MAX_ID or not body.isascii():
            return None
        transfer = body.decode()
        self._ended.add(transfer)
        self._pieces = {key: pieces for key, pieces in self._pieces.items() if key[0] != transfer}
        self.complete = transfer == self.until
        return (frames.KEPT,)

    def _part(self, read: Body) -> tuple[int, ...] | None:
        try:
            name = frames.read_name(read.name, FACTS)
        except WireError:
            return None
        part, size = (name.block.key, name.group), FACTS.groups[name.group].num_bytes
        if read.kind == frames.SEAL:
            return self._seal(read, name.transfer, part, name.block)
        offset, wanted = read.span or (0, size)
        payload = self._payload(read, wanted)
        where = frames.SPAN.pack(offset, wanted) + zlib.crc32(payload).to_bytes(4, "little")
        right = self._checked(read, read.name + (where if read.span else payload))
        if not right or not wanted or len(payload) != wanted or offset + wanted > size or not self._there(read):
            return None
        self.claims.setdefault(part, set()).update(enumerate(payload, offset))
        if name.transfer in self._ended:
            return (frames.DROPPED,)
        if read.span:
            return self._piece(name.transfer, part, offset, payload)
        self.parts.setdefault(part, (name.block, payload))
        return (frames.KEPT,)

    def _payload(self, read: Body, wanted: int) -> bytes:
        """The bytes that a frame has or names, which may be too few."""
        if read.kind not in SLOTTED:
            return read.rest
        return (self.memory or b"")[read.head[0] * LARGEST :][: min(wanted, LARGEST)]

    def _there(self, read: Body) -> bool:
        """Whether the bytes are where this link may have them."""
        slotted = not read.rest and self._shares and read.head[0] < frames.WINDOW
        return read.kind not in SLOTTED or slotted

    def _checked(self, read: Body, covered: bytes) -> bool:
        """Whether the checksum over these bytes is right."""
        right = zlib.crc32(covered)
        if self.repairs and read.head[-1]:
            read.head[-1] = right
        return read.head[-1] == right

    def _piece(self, transfer: str, part: Name, offset: int, payload: bytes) -> tuple[int, ...] | None:
        if part in self.parts:
            return (frames.KEPT,)
        pieces = self._pieces.setdefault((transfer, part), {})
        if len(pieces.get(offset, b"")) == len(payload):
            return (frames.KEPT,) if pieces[offset] == payload or not self.ample else None
        ends = sorted([*((at, at + len(piece)) for at, piece in pieces.items()), (offset, offset + len(payload))])
        if any(before[1] > after[0] for before, after in pairwise(ends)):
            return None if self.ample else (frames.KEPT,)
        pieces[offset] = payload
        return (frames.KEPT,)

    def _seal(self, read: Body, transfer: str, part: Name, block: StoredBlock) -> tuple[int, ...] | None:
        if read.rest:
            return None
        if transfer in self._ended:
            return (frames.DROPPED,)
        pieces = sorted(self._pieces.pop((transfer, part), {}).items())
        rows = (frames.SPAN.pack(at, len(p)) + zlib.crc32(p).to_bytes(4, "little") for at, p in pieces)
        right = self._checked(read, b"".join(rows))
        joined = b"".join(piece for _, piece in pieces)
        if right and len(joined) == FACTS.groups[part[1]].num_bytes:
            self.parts.setdefault(part, (block, joined))
        return (frames.KEPT if part in self.parts else frames.INCOMPLETE,)
