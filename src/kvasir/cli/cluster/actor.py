"""The actor of a replica: an engine and its host in a process of Ray. Ray starts it again when it dies.

Ray only starts, places and ends it. Requests and tokens are exchanged with the server over the host's own socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

import psutil

from kvasir.cli.cluster.spec import ReplicaSpec, Started, decode_spec, encode
from kvasir.cli.replicas import read_secret
from kvasir.cli.resolve import resolve
from kvasir.config import EngineOptions, check
from kvasir.engine.host import EngineHost
from kvasir.engine.sockets import make_socket_path, remove_socket
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import KvasirError
from kvasir.serve.http.tls import Tls

ALONE_SECONDS = 300.0  # without a server
LOOK_SECONDS = 5.0


class ReplicaActor:
    def __init__(self, spec: bytes, nodes: list[str]):
        """spec: a ReplicaSpec. nodes: the addresses of all nodes."""
        from ray.util import get_node_ip_address  # type: ignore[import-not-found]

        self._spec = decode_spec(spec)
        self._ip, self._nodes = get_node_ip_address(), nodes
        self._starting = asyncio.Lock()
        self._engine: ProcessEngine | None = None
        self._host: EngineHost | None = None
        self._socket: Path | None = None
        self._address = ""
        self._watching: asyncio.Task[None] | None = None
        with contextlib.suppress(OSError):
            os.chdir(self._spec.folder)

    async def pid(self) -> int:
        """Answers as soon as the actor has a place."""
        self._watching = self._watching or asyncio.ensure_future(self._end_if_alone())
        return os.getpid()

    async def start(self) -> bytes:
        """Starts the engine unless it runs; a Started."""
        async with self._starting:
            if not self._address:
                try:
                    self._address = await self._start()
                except KvasirError as error:
                    return encode(Started("", error.message, error.hint))
            return encode(Started(self._address))

    async def _start(self) -> str:
        spec = self._spec
        options, _ = await asyncio.to_thread(resolve, placed(spec, self._ip, self._nodes))
        check(options)
        key = read_secret(spec.reach.key) if spec.reach else ""
        engine = ProcessEngine(options, hang_seconds=spec.hang, patient=True, hands_over=True)
        await engine.start()
        try:
            host = EngineHost(engine, key)
            address = await self._listen(host)
        except BaseException:
            await engine.stop()
            raise
        self._engine, self._host = engine, host
        return address

    async def _end_if_alone(self) -> None:
        """Ends this actor, for good, when it has had no server for long: none will come."""
        import ray  # type: ignore[import-not-found]

        alone = 0.0
        while alone < ALONE_SECONDS:
            await asyncio.sleep(LOOK_SECONDS)
            wanted = self._starting.locked() or (self._host and self._host.num_clients)
            alone = 0.0 if wanted else alone + LOOK_SECONDS
        await self.stop()
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def _listen(self, host: EngineHost) -> str:
        reach = self._spec.reach
        if reach is None:
            self._socket = make_socket_path()
            await host.listen_unix(self._socket)
            return f"unix:{self._socket}"
        context = Tls(reach.cert, reach.cert_key).context()
        port = await host.listen_tcp(self._ip, 0, context)
        return f"tls://[{self._ip}]:{port}" if ":" in self._ip else f"tls://{self._ip}:{port}"

    async def stop(self) -> None:
        """Ends the engine."""
        async with self._starting:
            if self._host and self._engine:
                await self._host.close()
                await self._engine.stop()
            if self._socket:
                remove_socket(self._socket)


def placed(spec: ReplicaSpec, ip: str, nodes: list[str]) -> EngineOptions:
    """The options of the replica's engine on this node: it has a share of the memory that engines take by default, as
    of the processors. With roles on several nodes, blocks are exchanged among all of them."""
    share = min(1.0, spec.resources.cpus / (psutil.cpu_count() or 1)) or 1.0
    options = replace(spec.options, host_share=share)
    if not spec.reach or options.role == "both":
        return options
    if options.role == "prefill":
        return replace(options, transfer_peer=nodes)
    return replace(options, transfer_listen=f"{ip}:0")
