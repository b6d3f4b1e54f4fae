"""Frames between PeerTier and PeerServer: kind (1 byte), length (8 bytes), body. A receiver states beforehand which
kinds and lengths it accepts.

client                     server
the greeting of kv.transfer.frames, then
HAS   group, keys     ->   HELD    for each key a byte: 1 if the server has the part, else 0
LOAD  a part's name   ->   RECORD  as in a file, or MISS
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from kvasir.kv.tiers.block import KEY_BYTES, MAX_BLOCK_SIZE, MAX_NAMESPACE, StoredBlock

HAS, HELD, LOAD, RECORD, MISS = range(4, 9)

FRAME = struct.Struct("<BQ")
NUMBER = struct.Struct("<I")
CREDENTIALS = struct.Struct("3i")  # ucred: pid, uid, gid
MAX_KEYS = 4096  # per HAS frame
HAS_BYTES = NUMBER.size + MAX_KEYS * KEY_BYTES
LOAD_BYTES = MAX_NAMESPACE + MAX_BLOCK_SIZE * 4 + KEY_BYTES + 64


class WireError(Exception):
    """The other side sent an invalid frame or closed the connection, which is unusable from then on."""


class Want(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The body of a LOAD frame (msgpack): the name of a part."""

    namespace: bytes
    parent: bytes
    ids: bytes
    group: int


class BlockSocket:
    """One connected stream socket. Sends and receives raise OSError after `deadline` (time.monotonic())."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.deadline = 0.0

    def begin(self, seconds: float) -> None:
        """Sets the deadline to `seconds` from the call."""
        self.deadline = time.monotonic() + seconds

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer is too slow")
        self.sock.settimeout(left)

    def send(self, kind: int, *parts: bytes | memoryview) -> None:
        """Sends one frame whose body is the concatenation of `parts`."""
        head = FRAME.pack(kind, sum(len(part) for part in parts))
        for part in (head, *parts):
            self._limit()
            self.sock.sendall(part)

    def fill(self, buffer: memoryview) -> None:
        """Receives exactly as many bytes as `buffer` holds. Raises WireError if the connection ends early."""
        while buffer:
            self._limit()
            n = self.sock.recv_into(buffer)
            if n == 0:
                raise WireError("the peer has disconnected")
            buffer = buffer[n:]

    def head(self, most: Mapping[int, int]) -> tuple[int, int]:
        """Kind and body length of the next frame. most: kind -> greatest length; raises WireError for other frames."""
        head = bytearray(FRAME.size)
        self.fill(memoryview(head))
        kind, length = FRAME.unpack(head)
        if kind not in most or length > most[kind]:
            raise WireError(f"a frame of kind {kind} and {length} bytes")
        return kind, length

    def body(self, length: int) -> bytearray:
        """Receives the body of a frame."""
        buffer = bytearray(length)
        self.fill(memoryview(buffer))
        return buffer

    def shut(self) -> None:
        """Makes calls that wait on the socket fail. For other threads."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket."""
        self.sock.close()


def of_this_user(sock: socket.socket) -> bool:
    """Whether the other end of a connected socket is a process of this user; True if the system cannot report it."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return uid == os.getuid()


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
