"""Messages between two processes of one machine, over a socket pair."""

from __future__ import annotations

import socket
import struct
from typing import Self

from kvasir.plan import Bytes

_LENGTH = struct.Struct("<Q")
_ONE_READ = 1 << 20


class Channel:
    """One end. Each message is bytes of any length. Both ends belong to one engine, so lengths are trusted."""

    def __init__(self, end: socket.socket):
        self._socket = end

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Both ends."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    @classmethod
    def of(cls, fd: int) -> Self:
        """The end that this process was given as an open file."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """The number of the open file, -1 once closed."""
        return self._socket.fileno()

    def send(self, message: Bytes) -> None:
        """Sends a message. Raises OSError if the other end is closed."""
        self._socket.sendall(_LENGTH.pack(len(message)))
        self._socket.sendall(message)

    def receive(self) -> Bytes:
        """Waits for a message. Raises EOFError if the other end is closed."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return memoryview(self._read(length))

    def _read(self, length: int) -> bytearray:
        found, at = bytearray(length), 0
        view = memoryview(found)
        while at < length:
            try:
                count = self._socket.recv_into(view[at : at + _ONE_READ])
            except ConnectionResetError:
                count = 0
            if not count:
                raise EOFError("the other process has closed the channel")
            at += count
        return found

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()
