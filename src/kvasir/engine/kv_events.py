"""Publishes KV cache events over ZMQ as vLLM 0.33 does, so that routers written for it follow Kvasir's prefix caches.

A PUB socket sends each batch as (topic, sequence number as 8 bytes, batch). A ROUTER socket answers a number with the
batches from it on that are still in the buffer, as (b"", topic, number, batch), and at the end (b"", b"", -1, b"").
Neither ever waits for a subscriber: one that reads too slowly misses batches, sees the gap in the numbers, and asks for
them again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import zmq
import zmq.asyncio

from kvasir.engine.kv_event_format import AllBlocksCleared, Event, EventBatch, batches
from kvasir.errors import ConfigError
from kvasir.kv.changes import CacheChanges

log = logging.getLogger("kvasir.engine")

END = (-1).to_bytes(8, "big", signed=True)
BUFFER_BYTES = 64 << 20  # of batches that can be replayed
MOST_STEPS = 1 << 20
LONGEST_REQUEST = 4096  # bytes of a frame from a subscriber
LINGER = 100  # milliseconds for the last batches
TURN = 64  # batches of a replay that are sent at a time

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """vLLM's KVEventsConfig. endpoint: bound if its host is * (or ::, or with ipc), else connected to; replay_endpoint
    is bound in any case. buffer_steps: batches that can be replayed. hwm: batches that wait for a subscriber, by
    default as many (vLLM's 100,000 may take gigabytes). max_queue_size has no effect: nothing is queued before
    publishing. host: the address that * stands for."""

    enable_kv_cache_events: bool | None = None
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 10_000
    max_queue_size: int = 100_000
    topic: str = ""
    host: str = "127.0.0.1"


def parse_kv_events(text: str | None, host: str = "127.0.0.1") -> KvEventsConfig | None:
    """The JSON object of --kv-events; None if it turns events off. host: that of the server. Raises ConfigError."""
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text, type=dict[str, bool | int | str | None])
        unknown = set(found) - set(KvEventsConfig.__dataclass_fields__) | found.keys() & {"host"}
        if unknown:
            raise msgspec.ValidationError(f"there is no field {min(unknown)!r:.80}")
        config = msgspec.convert(found, KvEventsConfig)
    except msgspec.DecodeError as error:
        example = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
        raise ConfigError(f"kv_events: {error}", f"expected a JSON object such as {example}") from error
    if config.publisher not in (None, "zmq", "null"):
        raise ConfigError(f"kv_events: the publisher is {config.publisher!r:.80}", "expected zmq or null")
    if config.enable_kv_cache_events is None:
        raise ConfigError("kv_events does not say whether events are on", 'add "enable_kv_cache_events": true')
    for name, most in (("buffer_steps", MOST_STEPS), ("hwm", 1 << 30), ("max_queue_size", 1 << 60)):
        if not 1 <= getattr(config, name) <= most:
            raise ConfigError(f"kv_events: {name} is {getattr(config, name)}", f"expected 1 to {most}")
    config = replace(config, host=_address(host))
    for endpoint in (config.endpoint, config.replay_endpoint):
        if endpoint is not None:
            _check(endpoint)
    return config if config.enable_kv_cache_events and config.publisher != "null" else None


def _check(endpoint: str) -> None:
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    fine = bool(rest) if kind == "ipc" else kind == "tcp" and host and port.isdecimal() and int(port) < 1 << 16
    if not fine:
        raise ConfigError(f"kv_events: the endpoint {endpoint!r:.80}", "expected tcp://HOST:PORT or ipc://PATH")


def _address(host: str) -> str:
    """A numeric address: ZMQ does not look up names to bind. IPv6 in brackets."""
    try:
        found = str(socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"kv_events: the host {host!r:.80} has no address: {error}", "check --host") from error
    return f"[{found}]" if ":" in found else found


def at_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a replica, as vLLM has it: its rank is added to the port, or to the name with ipc."""
    base, _, port = endpoint.rpartition(":")
    if not rank or port == "0":
        return endpoint
    return f"{base}:{int(port) + rank}" if endpoint.startswith("tcp:") else f"{endpoint}_dp{rank}"


def check_ranks(config: KvEventsConfig, count: int) -> None:
    """Raises ConfigError if replicas would use the same port twice."""
    ports = [int(e.rpartition(":")[2]) for e in (config.endpoint, config.replay_endpoint) if e and e[:3] == "tcp"]
    if len(ports) == 2 and all(ports) and abs(ports[0] - ports[1]) < count:
        message = f"kv_events: with {count} replicas, ports from {ports[0]} and from {ports[1]} on overlap"
        raise ConfigError(message, f"leave at least {count} between the ports of endpoint and replay_endpoint")


class KvEvents:
    """Publishes the changes of one cache. Numbers go on if it is opened again. Not thread-safe, never blocks.

    published: batches. dropped: batches that at least one subscriber missed since it reads too slowly. endpoint,
    replay_endpoint: where it is, once it is open."""

    def __init__(self, config: KvEventsConfig, rank: int = 0):
        self._config, self._rank = config, rank
        self._topic = config.topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffered = 0  # bytes
        self._context: zmq.Context | None = None
        self._task: asyncio.Task | None = None
        self._replies: zmq.asyncio.Socket | None = None
        self._number = 0  # of the next batch
        self._expected = 0  # number of the next changes; 0 if a snapshot must come
        self.published = self.dropped = 0
        self.endpoint = self.replay_endpoint = ""

    # -- sockets -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Binds the sockets, or connects; idempotent. Raises ConfigError."""
        if self._context is not None:
            return
        config, self._context = self._config, zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, config.hwm)
            where = at_rank(config.endpoint, self._rank)
            binds = "*" in where or "::" in where or where.startswith("ipc:")
            self.endpoint = self._bound(self._pub, where) if binds else self._connected(where)
            if config.replay_endpoint is not None:
                # Two replays fit, since ZMQ learns late what was read.
                self._router = self._socket(zmq.ROUTER, 2 * (config.buffer_steps + 1))
                self.replay_endpoint = self._bound(self._router, at_rank(config.replay_endpoint, self._rank))
        except BaseException:
            self.close()
            raise
        replay = f", replay at {self.replay_endpoint}" if self.replay_endpoint else ""
        log.info("KV cache events at %s%s", self.endpoint, replay)
        if not is_loopback(config):
            log.warning("whoever can reach that address reads the prompts' token ids: there is neither key nor TLS")

    def _socket(self, kind: int, most: int) -> zmq.Socket:
        assert self._context is not None
        made = self._context.socket(kind)
        made.sndhwm = most
        made.setsockopt(zmq.MAXMSGSIZE, LONGEST_REQUEST)
        return made

    def _bound(self, made: zmq.Socket, endpoint: str) -> str:
        endpoint = endpoint.replace("*", self._config.host, 1)
        made.ipv6 = "[" in endpoint
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            why = "it is in use" if error.errno == zmq.EADDRINUSE else error.strerror
            hint = "end what uses it, or give another port" if error.errno == zmq.EADDRINUSE else "check the address"
            raise ConfigError(f"KV cache events cannot be published at {endpoint}: {why}", hint) from error
        return made.getsockopt_string(zmq.LAST_ENDPOINT)

    def _connected(self, endpoint: str) -> str:
        try:
            self._pub.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"KV cache events cannot be sent to {endpoint}: {error.strerror}", "check it") from error
        return endpoint

    def serve(self) -> None:
        """Begins to answer requests for replays, on the running event loop."""
        if self.replay_endpoint and self._task is None:
            self._replies = zmq.asyncio.Socket.shadow(self._router)
            self._task = asyncio.create_task(self._replay(self._replies))

    def close(self) -> None:
        """Closes the sockets; idempotent."""
        if self._task is not None and self._replies is not None:
            self._task.cancel()
            self._replies.close()
            self._task = self._replies = None
        if self._context is not None:
            self._context.destroy(linger=LINGER)
            self._context = None
        self.endpoint = self.replay_endpoint = ""

    # -- publishing --------------------------------------------------------------------------------------------

    def take(self, changes: CacheChanges) -> bool:
        """Publishes changes. False if some before them are missing: then nothing is published until a snapshot
        comes."""
        if not changes.snapshot and changes.number != self._expected:
            self.clear()
            return False
        self._expected = changes.number + 1
        for events in batches(changes):
            self._publish(events)
        return True

    def clear(self) -> None:
        """The cache is gone; a snapshot must come before other changes."""
        if self._expected:
            self._expected = 0
            self._publish([AllBlocksCleared()])

    def _publish(self, events: list[Event]) -> None:
        batch = _encode(EventBatch(time.time(), events, self._rank))
        self._buffer.append((self._number, batch))
        self._buffered += len(batch)
        while len(self._buffer) > self._config.buffer_steps or self._buffered > BUFFER_BYTES:
            self._buffered -= len(self._buffer.popleft()[1])
        if self._context is not None:
            self._send((self._topic, self._number.to_bytes(8, "big"), batch))
        self._number += 1
        self.published += 1

    def _send(self, frames: tuple[bytes, bytes, bytes]) -> None:
        """Sends to all subscribers with room. ZMQ does not tell whether one has none unless all are to have it, so that
        is tried first."""
        try:
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.NOBLOCK)

    # -- replay ------------------------------------------------------------------------------------------------

    async def _replay(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) == 3 and not frames[1] and 1 <= len(frames[2]) <= 8:
                await self._send_from(int.from_bytes(frames[2], "big"), frames[0], router.send_multipart)
            else:
                log.debug("a replay was asked for in %d frames; expected an empty one and 8 bytes", len(frames) - 1)

    async def _send_from(self, first: int, to: bytes, send: Callable) -> None:
        found = [one for one in self._buffer if one[0] >= first]
        for i, (number, batch) in enumerate(found):
            if i % TURN == TURN - 1:
                await asyncio.sleep(0)
            await send((to, b"", self._topic, number.to_bytes(8, "big"), batch))
        await send((to, b"", b"", END, b""))


def is_loopback(config: KvEventsConfig) -> bool:
    """Whether only processes of this machine can read the events."""
    over_tcp = [e for e in (config.endpoint, config.replay_endpoint) if e and e.startswith("tcp:")]
    hosts = [e.removeprefix("tcp://").rpartition(":")[0] for e in over_tcp]
    return all(_is_local(config.host if host == "*" else host) for host in hosts)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
