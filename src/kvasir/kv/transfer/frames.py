"""Messages between a sender and a receiver of blocks, in the frames of block_socket. The one that connects greets:

client                                     server
HELLO     digest, nonce, what it wants ->  CHALLENGE   nonce, proof that it has the key
PROOF     proof that it has the key    ->  WELCOME; or a REFUSAL and the end
then, from the sender to the receiver:
SHARE     memory of both (socket files only), with its descriptor
PART      a part with its bytes        ->  TAKEN       one byte: 1 if the part is kept
SLOT      a part in the shared memory  ->  TAKEN
PIECE     bytes of a part from an offset on, while other bytes of it are still being computed  ->  TAKEN
SLICE     the same in the shared memory                                                        ->  TAKEN
SEAL      all pieces of a part have been sent, with a checksum over all of them  ->  TAKEN; 2 if it is not complete
DONE      no more parts of a transfer  ->  TAKEN
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec

from kvasir.kv.tiers.block import MAX_BLOCK_SIZE, MAX_NAMESPACE, StoredBlock, StoreFacts
from kvasir.kv.transfer.block_socket import WireError

VERSION = 2
HELLO, CHALLENGE, PROOF, WELCOME, REFUSAL, SHARE, PART, SLOT, DONE, TAKEN, PIECE, SLICE, SEAL = range(20, 33)

MAX_ID = 64  # characters of a transfer's id
PART_HEAD = struct.Struct("<IH")  # checksum, bytes of the name; the name and the bytes follow
SLOT_HEAD = struct.Struct("<IIH")  # number of the slot, checksum, bytes of the name; the name follows
SPAN = struct.Struct("<QQ")  # offset and bytes of a piece; between the head and the name
SHARED = struct.Struct("<QI")  # bytes of a slot, number of slots
NAME_BYTES = MAX_NAMESPACE + MAX_BLOCK_SIZE * 4 + 256
HELLO_BYTES = 512
ANSWER_BYTES = 128
WINDOW = 4  # parts or pieces on their way to the receiver, at most
DROPPED, KEPT, INCOMPLETE = range(3)  # what a TAKEN says

FOREIGN, UNREADY, UNKNOWN, DENIED = "foreign", "unready", "unknown", "denied"
REASONS = {  # of a REFUSAL, with their meaning for users
    FOREIGN: "the engines differ in their weights, options or arithmetic",
    UNREADY: "its weights are not identified yet",
    UNKNOWN: "it does not offer this",
    DENIED: "the engines have different keys",
}


class Hello(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The first message. digest: of the client's facts, see StoreFacts.digest. wants: the id of a transfer to be sent
    to the client, or what else it asks for (kv.peers.wire.WANTS); "" if the client sends."""

    version: int
    digest: bytes
    nonce: bytes
    wants: str


class PartName(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The name of a part, and the id of its transfer."""

    transfer: str
    namespace: bytes
    parent: bytes
    ids: bytes
    group: int

    @property
    def block(self) -> StoredBlock:
        return StoredBlock(self.namespace, self.parent, self.ids)


class Grown(Protocol):
    """A part that is sent in pieces."""

    @property
    def check(self) -> int:
        """`checksum_of_pieces` of all pieces."""
        ...


class Part(NamedTuple):
    """What an outbox sends: a part of a transfer; without a block the end of the transfer. grown: of a part that is
    sent in pieces. offset: of a piece; -1 for a whole part, or for the end of a grown one. crc: CRC-32 of a piece."""

    transfer: str
    block: StoredBlock | None = None
    group: int = 0
    payload: memoryview = memoryview(b"")
    offset: int = -1
    grown: Grown | None = None
    crc: int = 0

    @property
    def seals(self) -> bool:
        """Whether it ends a grown part."""
        return self.grown is not None and self.offset < 0

    def name(self) -> bytes:
        """The name as it is sent."""
        assert self.block
        block = self.block
        return msgspec.msgpack.encode(PartName(self.transfer, block.namespace, block.parent, block.ids, self.group))


def checksum(name: bytes | bytearray, payload: memoryview) -> int:
    """CRC-32 of a name and its bytes: against damage on the way. Who may send is decided when a link is opened."""
    return zlib.crc32(payload, zlib.crc32(name))


def checksum_of_piece(name: bytes | bytearray, offset: int, num_bytes: int, crc: int) -> int:
    """CRC-32 of a name, and of where a piece lies and the CRC-32 of its bytes."""
    return zlib.crc32(_piece(offset, num_bytes, crc), zlib.crc32(name))


def checksum_of_pieces(pieces: Iterable[tuple[int, int, int]]) -> int:
    """The checksum over a whole part in pieces: CRC-32 of their (offset, bytes, CRC-32 of the bytes), by offset. It
    needs no second pass over the bytes."""
    return zlib.crc32(b"".join(_piece(*piece) for piece in sorted(pieces)))


def _piece(offset: int, num_bytes: int, crc: int) -> bytes:
    return SPAN.pack(offset, num_bytes) + crc.to_bytes(4, "little")


def read_hello(body: bytes | bytearray) -> Hello:
    """Raises WireError."""
    try:
        hello = msgspec.msgpack.decode(body, type=Hello)
    except (msgspec.DecodeError, ValueError):
        raise WireError("the greeting is malformed") from None
    if hello.version != VERSION or len(hello.nonce) != 32 or len(hello.wants) > MAX_ID:
        raise WireError("the greeting is of another version, or out of bounds")
    return hello


def read_reason(body: bytes | bytearray) -> str:
    """The reason of a refusal, one of REASONS: it is logged, and the other end may not be an engine. Raises
    WireError."""
    reason = bytes(body).decode("ascii", "replace")
    if reason not in REASONS:
        raise WireError("a refusal for no known reason")
    return reason


def read_name(body: bytes | bytearray, facts: StoreFacts) -> PartName:
    """The name of a part of these facts. Raises WireError."""
    try:
        name = msgspec.msgpack.decode(body, type=PartName)
    except (msgspec.DecodeError, ValueError):
        raise WireError("the name of a part is malformed") from None
    if len(name.transfer) > MAX_ID or not facts.admits(name.block, name.group):
        raise WireError("the part belongs to another store")
    return name


def read_id(body: bytes | bytearray) -> str:
    """The id of a transfer. Raises WireError."""
    try:
        return bytes(body).decode("ascii")
    except UnicodeDecodeError:
        raise WireError("the id of a transfer is malformed") from None
