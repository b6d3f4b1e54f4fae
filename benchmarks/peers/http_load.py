"""Load for a server of the OpenAI protocol: many concurrent streams, with tokens per second and each stream's times.

The client uses plain sockets, so that it takes little CPU time from the server. It sends token ids and takes token
counts from the server's usage field, since hardly any token of a model with random weights has a text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.peers.places import PeerError


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream. begun, first, last: time.perf_counter when it was sent, at its first event and at its last one."""

    begun: float
    first: float
    last: float
    tokens: int

    @property
    def tpot(self) -> float:
        """Seconds per token after the first one."""
        return (self.last - self.first) / max(1, self.tokens - 1)


async def load(url: str, model: str, prompts: Sequence[Sequence[int]], new: int, users: int) -> dict[str, float]:
    """Figures of all prompts, `users` at a time, each continued by `new` tokens. Raises PeerError."""
    gate = asyncio.Semaphore(users)

    async def one(ids: Sequence[int]) -> Stream:
        async with gate:
            return await stream(url, body(model, ids, new))

    begun = time.perf_counter()
    async with asyncio.timeout(3600):
        streams = await asyncio.gather(*(one(ids) for ids in prompts))
    if any(found.tokens != new for found in streams):
        raise PeerError(f"{url}: streams have {sorted({found.tokens for found in streams})} tokens, not {new}")
    seconds = max(found.last for found in streams) - begun
    figures = {"tokens_per_s": len(prompts) * new / seconds}
    for name, values in (("tpot", [s.tpot for s in streams]), ("ttft", [s.first - s.begun for s in streams])):
        for percent, value in zip((50, 99), np.percentile(values, (50, 99)), strict=True):
            figures[f"{name}_p{percent}_s"] = float(value)
    return figures


def body(model: str, ids: Sequence[int], new: int) -> dict[str, Any]:
    return {
        "model": model, "prompt": list(ids), "max_tokens": new, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


async def stream(url: str, wire: dict[str, Any]) -> Stream:
    """POST /v1/completions, read to the stream's end. Raises PeerError."""
    begun, times, tokens = time.perf_counter(), [], 0
    try:
        reader, writer = await _post(url, json.dumps(wire).encode())
    except OSError as error:
        raise PeerError(f"{url} cannot be reached: {error}") from error
    try:
        async for event in _events(reader):
            if event.get("error"):
                raise PeerError(f"{url}: {event['error']}")
            if event.get("choices"):
                times.append(time.perf_counter())
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    except (asyncio.IncompleteReadError, OSError, ValueError) as error:
        raise PeerError(f"{url}: the stream broke off: {error}") from error
    finally:
        await _close(writer)
    if not times:
        raise PeerError(f"{url}: the stream ended without a token")
    return Stream(begun, times[0], times[-1], tokens)


async def _post(url: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    await writer.drain()
    status = (await reader.readline()).split()
    if len(status) < 2 or status[1] != b"200":
        text = (await reader.read(2000)).decode(errors="replace")
        await _close(writer)
        raise PeerError(f"{url} returned {status[1:2]}: {text}")
    return reader, writer


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event."""
    rest = b""
    async for data in _chunks(reader):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body, chunk by chunk."""
    headers = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" not in headers:
        while data := await reader.read(1 << 16):
            yield data
        return
    while size := int(await reader.readline(), 16):
        yield (await reader.readexactly(size + 2))[:-2]
