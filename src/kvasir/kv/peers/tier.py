"""PeerTier: asks another engine for blocks, over links of kv.transfer.

Peers are only read from; an engine saves to its own tier. A peer that is dead, slow, of another model or sends invalid
frames is a miss: every exchange has a deadline, and after a failed one the peer is not contacted for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvasir.errors import ConfigError
from kvasir.kv.peers import wire
from kvasir.kv.tiers import record
from kvasir.kv.tiers.block import Name, StoredBlock, StoreFacts
from kvasir.kv.tiers.connector import Bytes, Failed
from kvasir.kv.tiers.record import Unusable
from kvasir.kv.tiers.transfers import Loads, TransferMeter, TransferWorker
from kvasir.kv.transfer.block_socket import BlockSocket, WireError
from kvasir.kv.transfer.link import Address, Greeting, Refused, connect
from kvasir.kv.transfer.security import NO_CREDENTIALS, Credentials
from kvasir.kv.transfer.socket_file import check_path
from kvasir.memory import QUEUE_BYTES
from kvasir.statistics import TierStats

log = logging.getLogger("kvasir.kv")

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0

KNOWN_SECONDS = 10.0  # lifetime of a peer's answer that it has a part
UNKNOWN_SECONDS = 2.0  # lifetime of its answer that it does not have a part
MAX_ANSWERS = 1 << 16


class PeerLink:
    """One connection to a server, opened on demand. Only one thread uses it."""

    def __init__(self, address: Address, credentials: Credentials, facts: StoreFacts):
        self._address = address
        self._greeting = Greeting(credentials, facts.digest)
        self._wire: BlockSocket | None = None
        self._pause = 0.0
        self._retry_at = 0.0
        self._closed = False

    def exchange(self, kind: int, body: bytes, answer: Callable[[BlockSocket], T]) -> T:
        """Sends a frame and reads the response with `answer`. Raises Unusable("peer") at once or within
        wire.EXCHANGE_SECONDS; passes on Unusable from `answer`."""
        if self._closed or time.monotonic() < self._retry_at:
            raise Unusable("peer")
        try:
            link = self._wire = self._wire or connect(self._address, self._greeting, wire.WANTS)
            link.begin(wire.EXCHANGE_SECONDS)
            link.send(kind, body)
            result = answer(link)
        except (OSError, WireError, ConfigError, Refused) as error:
            self._fail(error)
            raise Unusable("peer") from None
        except Unusable as error:  # the rest of the record was not read
            self._fail(error)
            raise
        if self._pause:
            log.info("prefixes come from %s again", self._address)
        self._pause = 0.0
        return result

    def _fail(self, error: Exception) -> None:
        """Logs the first failure of several in a row."""
        self._drop()
        if not self._pause and not self._closed:
            log.warning("no prefixes from %s for now, they are computed: %s", self._address, error)
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
        self._retry_at = time.monotonic() + self._pause

    def _drop(self) -> None:
        if self._wire:
            self._wire.close()
            self._wire = None

    def shut(self) -> None:
        """Makes the running exchange and all later ones fail at once. For other threads."""
        self._closed = True
        link = self._wire
        if link:
            link.shut()

    def close(self) -> None:
        """Closes the connection. No thread may use the link afterwards."""
        self._closed = True
        self._drop()


class PeerTier:
    """A KVConnector over the PeerServer at an address.

    `has` uses cached answers of the peer, which expire after some seconds.
    load_bytes: bound on parts being loaded or not yet fetched. Raises ConfigError for an unusable path, and for a host
    without credentials.
    """

    name = "peer"

    def __init__(
        self,
        address: Address,
        facts: StoreFacts,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        load_bytes: int = QUEUE_BYTES,
    ):
        check_peer(address, credentials)
        self.facts = facts
        self._meter = TransferMeter()
        self._changed = threading.Condition()
        self._answers: OrderedDict[Name, tuple[bool, float]] = OrderedDict()  # (has it, valid until)
        self._asked: set[Name] = set()  # queries in flight
        self._questions = PeerLink(address, credentials, facts)
        self._records = PeerLink(address, credentials, facts)
        self._asker: TransferWorker[list[Name]] = TransferWorker("kv-peer-ask", self._ask, 4 * wire.MAX_KEYS)
        self._loads = Loads("kv-peer-load", self._read, load_bytes, self._meter)

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        """Queries the peer for keys without a valid answer, at most wire.MAX_KEYS per call; see KVConnector.ask."""
        with self._changed:
            now = time.monotonic()
            names = ((key, group) for key in keys[: wire.MAX_KEYS])
            old = [name for name in names if name not in self._answers or self._answers[name][1] < now]
            new = [name for name in old if name not in self._asked]
            if new and self._asker.put(new, len(new)):
                self._asked.update(new)
            if timeout > 0:
                self._changed.wait_for(lambda: self._asked.isdisjoint(old), timeout)
            return self._asked.isdisjoint(old)

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        """Counts an expired answer until the next one arrives: a failed load costs little."""
        for i, key in enumerate(keys):
            there, _ = self._answers.get((key, group), (False, 0.0))
            if not there:
                return i
        return len(keys)

    def read_seconds(self, names: Sequence[Name]) -> float:
        """Estimated from the measured read rate and the bytes of open loads; see KVConnector.read_seconds."""
        return self._meter.read_seconds(self._loads.num_bytes + sum(self.facts.groups[g].num_bytes for _, g in names))

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        """Always False: peers are only read from."""
        return False

    def _ask(self, names: list[Name] | None) -> None:
        """Asks the peer which of some parts of one group it has. No response counts as having none."""
        if names is None:
            return

        def answer(link: BlockSocket) -> list[bool]:
            _, length = link.head({wire.HELD: len(names)})
            return wire.unpack_held(link.body(length), len(names))

        held = [False] * len(names)
        try:
            held = self._questions.exchange(wire.HAS, wire.pack_has([key for key, _ in names], names[0][1]), answer)
        except Unusable:
            self._forget()
        finally:
            with self._changed:
                self._learn(names, held)
                self._asked.difference_update(names)
                self._changed.notify_all()

    def _learn(self, names: Sequence[Name], held: Sequence[bool]) -> None:
        now = time.monotonic()
        with self._changed:
            for name, there in zip(names, held, strict=True):
                self._answers.pop(name, None)
                self._answers[name] = (there, now + (KNOWN_SECONDS if there else UNKNOWN_SECONDS))
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)

    def _forget(self) -> None:
        with self._changed:
            self._answers.clear()

    def start_load(self, block: StoredBlock, group: int = 0) -> int:
        """Queues a load from the peer; see KVConnector.start_load."""
        return self._loads.start(block, group, self.facts.groups[group].num_bytes)

    def _read(self, block: StoredBlock, group: int) -> memoryview:
        def answer(link: BlockSocket) -> memoryview | None:
            kind, length = link.head({wire.RECORD: record.max_size(self.facts, group), wire.MISS: 0})
            return record.unseal(self.facts, block, group, length, link.fill) if kind == wire.RECORD else None

        try:
            payload = self._records.exchange(wire.LOAD, wire.pack_load(block, group), answer)
        except Unusable:
            self._forget()
            raise
        if payload is None:
            self._learn([(block.key, group)], [False])
            raise Unusable("missing")
        return payload

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        """See KVConnector.poll."""
        return self._loads.poll(ticket, timeout)

    def cancel(self, ticket: int) -> None:
        """See KVConnector.cancel."""
        self._loads.cancel(ticket)

    def save(self, block: StoredBlock, group: int, payload: Bytes) -> bool:
        """Always False: a peer keeps only parts that it computed itself."""
        return False

    def ending(self) -> None:
        """Does nothing."""
        pass

    def stats(self) -> TierStats:
        """See KVConnector.stats."""
        return self._meter.stats(len(self._loads), self._loads.num_bytes)

    def each(self) -> dict[str, TierStats]:
        """See KVConnector.each."""
        return {self.name: self.stats()}

    def close(self, timeout: float = 5.0) -> None:
        """Ends the threads and closes the connections. The timeout is ignored: nothing is saved."""
        for link in (self._questions, self._records):
            link.shut()
        self._loads.close()
        self._asker.close(0.0)
        for link in (self._questions, self._records):
            link.close()


def check_peer(address: Address, credentials: Credentials) -> None:
    """Raises ConfigError for an address that cannot be connected to: a path that others could replace, or a host
    without a key and a certificate."""
    if address.path:
        check_path(address.path)
    else:
        credentials.context(server=False)
