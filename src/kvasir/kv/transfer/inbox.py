"""Inbox: verified parts of blocks from other engines, until the scheduler loads them; a KVConnector. A part that comes
in pieces becomes visible when all of it is here and its checksum is right.

A request that names a transfer waits for its end, for as long as something arrives and at most the transfer's seconds.
Then what has arrived is used, and the rest is computed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvasir.kv.tiers.block import Name, StoredBlock, StoreFacts
from kvasir.kv.tiers.connector import Bytes, Failed
from kvasir.kv.tiers.transfers import HeldLoads, TransferMeter
from kvasir.kv.transfer.assembly import Assembly
from kvasir.kv.transfer.frames import DROPPED, INCOMPLETE, KEPT
from kvasir.statistics import TierStats
from kvasir.types import Transfer

STALL_SECONDS = 5.0  # without a part, after which a transfer counts as ended
ORPHAN_SECONDS = 60.0  # for which parts are kept that no request has asked for
MAX_INCOMING = 4096  # transfers that are remembered


@dataclass(slots=True, eq=False)
class Incoming:
    """What is known of a transfer. moved: when it last made progress. deadline: until when a request waits for it; 0:
    none does. ended: nothing more will come. names: of its parts that are here. growing: those of which pieces are."""

    moved: float
    deadline: float = 0.0
    ended: bool = False
    names: set[Name] = field(default_factory=set)
    growing: dict[Name, Assembly] = field(default_factory=dict)


class Inbox:
    """max_bytes: bound on all parts. Raises nothing; a part that does not fit is not kept, and is computed."""

    name = "transfer"

    def __init__(self, facts: StoreFacts, max_bytes: int):
        self.facts = facts
        self._max_bytes = max_bytes
        self._meter = TransferMeter()
        self._loads = HeldLoads(self._meter)
        self._changed = threading.Condition()
        self._incoming: OrderedDict[str, Incoming] = OrderedDict()  # the one that moved last at the end
        self._parts: OrderedDict[Name, tuple[str, StoredBlock, memoryview]] = OrderedDict()
        self._num_bytes = 0

    # -- the links' side -----------------------------------------------------------------------------------------

    def keep(self, transfer: str, block: StoredBlock, group: int, payload: memoryview) -> bool:
        """Takes over a part. False if there is no room: the rest of the transfer is useless then."""
        with self._changed:
            incoming = self._move(transfer)
            name = (block.key, group)
            if incoming.ended:
                return False
            if name not in self._parts:
                if not self._reserve(incoming, payload.nbytes):
                    return False
                self._store(incoming, name, (transfer, block, payload))
            self._changed.notify_all()
            return True

    def _reserve(self, incoming: Incoming, num_bytes: int) -> bool:
        """Makes room for a part; False, and the transfer ends, if there is none."""
        if self._make_room(num_bytes):
            self._num_bytes += num_bytes
            return True
        self._meter.save("full")
        self._end(incoming)
        return False

    def _store(self, incoming: Incoming, name: Name, part: tuple[str, StoredBlock, memoryview]) -> None:
        self._parts[name] = part
        incoming.names.add(name)
        self._meter.save("saved", part[2].nbytes)

    def piece(self, transfer: str, block: StoredBlock, group: int, offset: int, payload: memoryview, crc: int) -> int:
        """Takes over bytes of a part, with their CRC-32; memory for all of it is reserved with the first ones. Returns
        KEPT, or DROPPED if there is no room: the rest of the transfer is useless then. Raises WireError for a piece
        that cannot belong to the part."""
        with self._changed:
            incoming, name = self._move(transfer), (block.key, group)
            if incoming.ended:
                return DROPPED
            self._changed.notify_all()
            if name in self._parts:
                return KEPT
            assembly, size = incoming.growing.get(name), self.facts.groups[group].num_bytes
            if assembly is None:
                if not self._reserve(incoming, size):
                    return DROPPED
                assembly = incoming.growing[name] = Assembly(size)
            assembly.add(offset, payload, crc)
            return KEPT

    def seal(self, transfer: str, block: StoredBlock, group: int, check: int) -> int:
        """The end of a part in pieces. Returns KEPT if it is complete, DROPPED if nothing more of the transfer is
        wanted, and INCOMPLETE if it must be sent as a whole: after a restart of this engine, or damage."""
        with self._changed:
            incoming, name = self._move(transfer), (block.key, group)
            if incoming.ended:
                return DROPPED
            self._changed.notify_all()
            assembly = incoming.growing.pop(name, None)
            payload = assembly.sealed(check) if assembly else None
            if payload is not None and name not in self._parts:
                self._store(incoming, name, (transfer, block, payload))
            elif assembly:
                self._num_bytes -= assembly.num_bytes
            return KEPT if name in self._parts else INCOMPLETE

    def done(self, transfer: str) -> None:
        """The sender says that nothing more will come."""
        with self._changed:
            self._end(self._move(transfer))

    def _end(self, incoming: Incoming) -> None:
        incoming.ended = True
        self._drop_growing(incoming)
        self._changed.notify_all()

    def _drop_growing(self, incoming: Incoming) -> None:
        """Gives back the memory of incomplete parts."""
        self._num_bytes -= sum(assembly.num_bytes for assembly in incoming.growing.values())
        incoming.growing.clear()

    def _move(self, transfer: str) -> Incoming:
        now = time.monotonic()
        incoming = self._incoming.setdefault(transfer, Incoming(now))
        incoming.moved = now
        self._incoming.move_to_end(transfer)
        while len(self._incoming) > MAX_INCOMING:
            self._drop_growing(self._incoming.popitem(last=False)[1])
        return incoming

    def _make_room(self, num_bytes: int) -> bool:
        """Removes parts that no request waits for, the oldest first, until so many bytes fit."""
        now = time.monotonic()
        for incoming in self._incoming.values():
            if incoming.moved + ORPHAN_SECONDS >= now:
                break
            self._drop_growing(incoming)
        for name, (transfer, _, _) in list(self._parts.items()):
            incoming = self._incoming.get(transfer)
            old = incoming is None or incoming.moved + ORPHAN_SECONDS < now
            if not old and self._num_bytes + num_bytes <= self._max_bytes:
                break
            if old or (incoming and incoming.ended and incoming.deadline < now):
                self._remove(name)
                self._meter.evict()
        return self._num_bytes + num_bytes <= self._max_bytes

    def _remove(self, name: Name) -> tuple[str, StoredBlock, memoryview]:
        found = self._parts.pop(name)
        self._num_bytes -= found[2].nbytes
        if incoming := self._incoming.get(found[0]):
            incoming.names.discard(name)
        return found

    # -- the scheduler's side ------------------------------------------------------------------------------------

    def expect(self, transfer: Transfer) -> None:
        """A request waits for this transfer from now on."""
        with self._changed:
            self._move(transfer.id).deadline = time.monotonic() + transfer.seconds

    def settled(self, transfer: str, timeout: float = 0.0) -> bool:
        """Whether nothing more is to be waited for. Waits at most `timeout` seconds for the answer to become True."""
        with self._changed:
            if timeout > 0:
                self._changed.wait_for(lambda: self._over(transfer), timeout)
            return self._over(transfer)

    def _over(self, transfer: str) -> bool:
        incoming, now = self._incoming.get(transfer), time.monotonic()
        return incoming is None or incoming.ended or now > min(incoming.deadline, incoming.moved + STALL_SECONDS)

    def forget(self, transfer: str) -> None:
        """No request waits for this transfer any more; what it did not load, its prefix cache had."""
        with self._changed:
            if incoming := self._incoming.get(transfer):
                incoming.deadline = 0.0
                self._drop_growing(incoming)
                for name in list(incoming.names):
                    self._remove(name)

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        """Always True: only requests that name a transfer wait for it."""
        return True

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        """The number of leading `keys` that have arrived."""
        return next((i for i, key in enumerate(keys) if (key, group) not in self._parts), len(keys))

    def read_seconds(self, names: Sequence[Name]) -> float:
        """Always 0.0: negligible."""
        return 0.0

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        """Always False: this is not a cache."""
        return False

    def start_load(self, block: StoredBlock, group: int = 0) -> int:
        """Hands out a part, which leaves the inbox: the prefix cache has it then."""
        name = (block.key, group)
        with self._changed:
            held = self._parts.get(name)
            return self._loads.start(block, held[1] if held else None, lambda: self._remove(name)[2])

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        """The result of `start_load`; never None."""
        return self._loads.poll(ticket)

    def cancel(self, ticket: int) -> None:
        """See KVConnector.cancel."""
        self._loads.cancel(ticket)

    def save(self, block: StoredBlock, group: int, payload: Bytes) -> bool:
        """Always False: this is not a cache."""
        return False

    def ending(self) -> None:
        """Does nothing."""

    def stats(self) -> TierStats:
        """See KVConnector.stats."""
        with self._changed:
            return self._loads.stats(len(self._parts), self._num_bytes)

    def each(self) -> dict[str, TierStats]:
        """See KVConnector.each."""
        return {self.name: self.stats()}

    def close(self, timeout: float = 5.0) -> None:
        """Does nothing: the exchange ends the links."""
