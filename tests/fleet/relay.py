"""A TCP relay that does to connections what networks do: it cuts, stalls, delays, loses and corrupts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable

CHUNK = 16384
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset

Change = Callable[[bytes], bytes]


class Relay:
    """Listens on a port of its own for connections to 127.0.0.1:target. The faults return whether they met bytes or
    connections."""

    def __init__(self, target: int):
        self.target, self.port = target, 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._delay = 0.0
        self._refuses = False
        self._refused = 0
        self._passed = 0  # chunks
        self._change: Change | None = None  # of the next chunk

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server
        self._server.close()
        await self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            self._refused += 1
            return _reset(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            return _reset(writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._writers.add(sink)
            task = asyncio.ensure_future(self._carry(source, sink, (writer, far_writer)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, both: tuple) -> None:
        try:
            while data := await source.read(CHUNK):
                await self._flows.wait()
                if self._delay:
                    await asyncio.sleep(self._delay)
                if change := self._change:
                    self._change, data = None, change(data)
                self._passed += 1
                sink.write(data)
                await sink.drain()
        except (OSError, RuntimeError):  # the latter if `close_half` has ended this direction
            pass
        finally:
            self._writers.discard(sink)
            for writer in both:
                _reset(writer)

    # -- faults ------------------------------------------------------------------------------------------------

    async def cut(self) -> bool:
        """Resets all connections."""
        found = list(self._writers)
        for writer in found:
            _reset(writer)
        return bool(found)

    async def close_half(self) -> bool:
        """Ends one direction of each connection."""
        found = [writer for writer in list(self._writers)[:1] if not writer.is_closing()]
        for writer in found:
            with contextlib.suppress(OSError):
                writer.write_eof()
        return bool(found)

    async def stall(self, seconds: float) -> bool:
        """Carries nothing for so long."""
        self._flows.clear()
        await asyncio.sleep(seconds)
        self._flows.set()
        return bool(self._writers)

    async def slow(self, seconds: float, delay: float) -> bool:
        """Each chunk comes later for so long."""
        self._delay, before = delay, self._passed
        await asyncio.sleep(seconds)
        self._delay = 0.0
        return self._passed > before

    async def refuse(self, seconds: float) -> bool:
        """Cuts, and takes no connection for so long."""
        self._refuses, before = True, self._refused
        await self.cut()
        await asyncio.sleep(seconds)
        self._refuses = False
        return self._refused > before

    async def corrupt(self) -> bool:
        """Inverts a bit of the next chunk."""
        return await self._once(lambda data: bytes((data[0] ^ 16,)) + data[1:])

    async def lose(self) -> bool:
        """Loses the first byte of the next chunk."""
        return await self._once(lambda data: data[1:])

    async def _once(self, change: Change) -> bool:
        self._change = change
        for _ in range(200):
            if self._change is None:
                return True
            await asyncio.sleep(0.05)
        self._change = None
        return False


def _reset(writer: asyncio.StreamWriter) -> None:
    if not writer.is_closing():
        with contextlib.suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
