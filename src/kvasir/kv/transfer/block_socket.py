"""BlockSocket: frames over a stream socket: kind (1 byte), length (8 bytes), body. A receiver states beforehand which
kinds and lengths it accepts."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress

FRAME = struct.Struct("<BQ")
CREDENTIALS = struct.Struct("3i")  # ucred: pid, uid, gid


class WireError(Exception):
    """The other side sent an invalid frame or closed the connection, which is unusable from then on."""


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
