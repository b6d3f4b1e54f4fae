"""Frames on a stream socket: a length (4 bytes, little-endian), then as many bytes of msgpack.

A reader states the greatest length that it accepts; a body takes memory as its bytes arrive, not before. A peer that is
silent, slow within a frame, or does not read is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import TypeVar

import msgspec

from kvasir.errors import KvasirError
from kvasir.kv.transfer.block_socket import of_this_user

T = TypeVar("T")

HEAD = struct.Struct("<I")
HIGH = 1 << 18  # bytes written and not sent, from which on the peer counts as late
BODY_SECONDS = 10.0  # for a body, and BODY_RATE bytes more for each further second
BODY_RATE = 1 << 20
STALL_SECONDS = 60.0  # for a late peer to read something


class FrameError(Exception):
    """The peer sent an invalid frame, is too slow, or closed the connection, which is unusable from then on."""


class FrameSocket:
    """One connection. Used on one event loop; one task reads."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(HIGH, HIGH // 4)

    async def read(self, most: int, idle: float | None) -> bytes:
        """The body of the next frame. most: bytes. idle: seconds until the frame must begin; None for no limit. Raises
        FrameError."""
        try:
            async with asyncio.timeout(idle):
                (length,) = HEAD.unpack(await self._reader.readexactly(HEAD.size))
            if length > most:
                raise FrameError(f"a frame of {length} bytes; at most {most} are accepted")
            async with asyncio.timeout(BODY_SECONDS + length / BODY_RATE):
                return await self._reader.readexactly(length)
        except TimeoutError:
            raise FrameError("the peer is silent, or too slow") from None
        except (OSError, EOFError) as error:
            raise FrameError(f"the connection is closed: {error}") from None

    def write(self, body: bytes) -> None:
        """Queues a frame. Never blocks; a closed connection takes it without effect."""
        if not self._writer.transport.is_closing():
            self._writer.write(HEAD.pack(len(body)) + body)

    @property
    def queued(self) -> int:
        """Bytes written and not sent."""
        return self._writer.transport.get_write_buffer_size()

    @property
    def late(self) -> bool:
        """Whether the peer reads more slowly than frames are written."""
        return self.queued > HIGH

    async def drain(self) -> None:
        """Returns when the peer is not late. Raises FrameError if it reads nothing for a while, or has left."""
        while True:
            before = self.queued
            try:
                async with asyncio.timeout(STALL_SECONDS):
                    return await self._writer.drain()
            except TimeoutError:
                if self.queued >= before:
                    raise FrameError("the peer does not read") from None
            except OSError as error:
                raise FrameError(f"the connection is closed: {error}") from None

    @property
    def is_own_user(self) -> bool:
        """Of a Unix socket, whether the other end is a process of this user."""
        with contextlib.closing(socket.socket(fileno=os.dup(self._writer.get_extra_info("socket").fileno()))) as sock:
            return of_this_user(sock)

    def abort(self) -> None:
        """Closes the connection at once, without sending what is queued."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Closes the connection after sending what is queued, within a second."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        self._writer.transport.abort()


def decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    """The message of a body. Raises FrameError if it is none."""
    try:
        return decoder.decode(body)
    except (KvasirError, msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise FrameError(f"a malformed message: {error!s:.200}") from None
