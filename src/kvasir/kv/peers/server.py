"""PeerServer: serves the parts of its tier to other engines, over links of kv.transfer."""

from __future__ import annotations

import threading

from kvasir.kv.peers import wire
from kvasir.kv.tiers import record
from kvasir.kv.tiers.block import StoredBlock
from kvasir.kv.tiers.connector import Failed, KVConnector
from kvasir.kv.transfer.acceptor import Acceptor
from kvasir.kv.transfer.block_socket import BlockSocket, WireError
from kvasir.kv.transfer.link import Address, Greeting, Listener
from kvasir.kv.transfer.security import NO_CREDENTIALS, Credentials

LOAD_SECONDS = 4.0  # part of wire.EXCHANGE_SECONDS, for the load from the server's own tier
IDLE_SECONDS = 300.0


class PeerServer:
    """Serves the parts of `tier` to other engines: of this user, on a socket file, or of those with the key and a
    certificate, over TCP. address: where they can connect; a port of 0 is replaced by a free one.

    Raises ConfigError if the address is unusable or another engine serves it, or for a host without credentials."""

    def __init__(self, address: Address, tier: KVConnector, credentials: Credentials = NO_CREDENTIALS):
        self._tier = tier
        greeting = Greeting(credentials, self._digest, lambda wants: wants == wire.WANTS)
        self._closing = threading.Event()
        listener = Listener(address, credentials)
        self.address = listener.address
        self._acceptor = Acceptor(listener, greeting, self._serve, "kv-peer")

    def _digest(self) -> bytes | None:
        facts = self._tier.facts
        return facts.digest() if facts.model else None  # the weights are not identified yet

    def _serve(self, link: BlockSocket, wants: str) -> None:
        while wants and not self._closing.is_set():
            self._answer(link)

    def _answer(self, link: BlockSocket) -> None:
        link.begin(IDLE_SECONDS)
        kind, length = link.head({wire.HAS: wire.HAS_BYTES, wire.LOAD: wire.LOAD_BYTES})
        link.begin(wire.EXCHANGE_SECONDS)
        body = link.body(length)
        if kind == wire.HAS:
            keys, group = wire.unpack_has(body)
            if group >= len(self._tier.facts.groups):
                raise WireError("the group belongs to another store")
            link.send(wire.HELD, bytes(self._tier.has((key,), group) for key in keys))
        else:
            self._give(link, *wire.unpack_load(body))

    def _give(self, link: BlockSocket, block: StoredBlock, group: int) -> None:
        if not self._tier.facts.admits(block, group):
            raise WireError("the part belongs to another store")
        payload = self._load(block, group)
        if payload is None:
            link.send(wire.MISS)
        else:
            link.send(wire.RECORD, record.seal(self._tier.facts, block, group, payload), payload)

    def _load(self, block: StoredBlock, group: int) -> memoryview | None:
        ticket = self._tier.start_load(block, group)
        result = self._tier.poll(ticket, LOAD_SECONDS)
        if result is None:
            self._tier.cancel(ticket)
        return None if isinstance(result, Failed) else result

    def close(self) -> None:
        """Closes all connections. The tier stays open: the engine owns it."""
        self._closing.set()
        for thread in self._acceptor.close():
            thread.join(wire.EXCHANGE_SECONDS)
