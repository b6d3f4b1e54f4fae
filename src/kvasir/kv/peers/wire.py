"""Messages between PeerTier and PeerServer, in the frames of kv.transfer.block_socket.

client                     server
the greeting of kv.transfer.frames, then
HAS   group, keys     ->   HELD    for each key a byte: 1 if the server has the part, else 0
LOAD  a part's name   ->   RECORD  as in a file, or MISS
"""

from __future__ import annotations

import struct

import msgspec

from kvasir.kv.tiers.block import KEY_BYTES, MAX_BLOCK_SIZE, MAX_NAMESPACE, StoredBlock
from kvasir.kv.transfer.block_socket import WireError

HAS, HELD, LOAD, RECORD, MISS = range(4, 9)

WANTS = "prefixes"  # what a client says in its greeting: no transfer has this id
EXCHANGE_SECONDS = 5.0  # for a question and its answer
NUMBER = struct.Struct("<I")
MAX_KEYS = 4096  # per HAS frame
HAS_BYTES = NUMBER.size + MAX_KEYS * KEY_BYTES
LOAD_BYTES = MAX_NAMESPACE + MAX_BLOCK_SIZE * 4 + KEY_BYTES + 64


class Want(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The body of a LOAD frame (msgpack): the name of a part."""

    namespace: bytes
    parent: bytes
    ids: bytes
    group: int


def pack_has(keys: list[bytes], group: int) -> bytes:
    """The body of a HAS frame."""
    return NUMBER.pack(group) + b"".join(keys)


def unpack_has(body: bytes | bytearray) -> tuple[list[bytes], int]:
    """(keys, group) of a HAS frame. Raises WireError for an invalid length."""
    if len(body) < NUMBER.size or (len(body) - NUMBER.size) % KEY_BYTES:
        raise WireError("the length of the keys is malformed")
    (group,) = NUMBER.unpack_from(body)
    return [bytes(body[i : i + KEY_BYTES]) for i in range(NUMBER.size, len(body), KEY_BYTES)], group


def unpack_held(body: bytes | bytearray, num_keys: int) -> list[bool]:
    """The answers of a HELD frame to `num_keys` keys. Raises WireError for an invalid body."""
    if len(body) != num_keys or body.strip(b"\x00\x01"):
        raise WireError("the reply does not match the keys")
    return [byte == 1 for byte in body]


def pack_load(block: StoredBlock, group: int) -> bytes:
    """The body of a LOAD frame."""
    return msgspec.msgpack.encode(Want(block.namespace, block.parent, block.ids, group))


def unpack_load(body: bytes | bytearray) -> tuple[StoredBlock, int]:
    """(block, group) of a LOAD frame. Raises WireError for an invalid body."""
    try:
        want = msgspec.msgpack.decode(body, type=Want)
    except (msgspec.DecodeError, ValueError):
        raise WireError("the name of a part is malformed") from None
    return StoredBlock(want.namespace, want.parent, want.ids), want.group
