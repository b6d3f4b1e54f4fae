"""Outbox: parts of blocks that wait to be sent, and the threads that send them.

A transfer with an address is sent there as soon as it has parts. One without is held until its receiver asks for it, or
until its time is over. Parts stay here until the receiver has acknowledged them: if a link breaks, what was under way
is sent again over the next one.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvasir.errors import ConfigError
from kvasir.kv.tiers.block import StoredBlock, StoreFacts
from kvasir.kv.transfer import frames
from kvasir.kv.transfer.block_socket import WireError
from kvasir.kv.transfer.frames import Part
from kvasir.kv.transfer.link import Link, Refused
from kvasir.kv.transfer.stream import POLL_SECONDS, PartSender
from kvasir.types import Transfer

log = logging.getLogger("kvasir.kv")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between attempts to connect
IDLE_SECONDS = 60.0  # after which a link without transfers is closed
MAX_OPEN = 4096  # transfers
MAX_SENDERS = 64  # addresses, each with a thread


@dataclass(slots=True, eq=False)
class Outgoing:
    """A transfer under way. channel: the address, or for a held one its id. deadline: by time.monotonic. ended: no more
    parts will be put. claimed: its receiver has asked for it."""

    transfer: Transfer
    channel: str
    deadline: float
    num_bytes: int = 0
    ended: bool = False
    claimed: bool = False
    growing: int = 0
    sealed: int = 0


class Growing:
    """A part whose bytes come in pieces. One thread adds them; another may drop the part."""

    def __init__(self, outbox: Outbox, outgoing: Outgoing, block: StoredBlock, group: int, num_bytes: int):
        self.num_bytes = num_bytes
        self.pieces: dict[int, tuple[memoryview, int]] = {}  # by offset: bytes, CRC-32
        self.over = False  # whether it is complete or dropped
        self.outgoing = outgoing
        self.block, self.group = block, group
        self._outbox = outbox

    def add(self, offset: int, payload: memoryview) -> None:
        """Takes over bytes from an offset on, which must not be written to any more."""
        self._outbox.put_piece(self, offset, payload.cast("B"))

    def seal(self) -> None:
        """All bytes have been added, and are those of the block."""
        self._outbox.end(self, whole=True)

    def drop(self) -> bool:
        """The part will not be completed. False if it is already."""
        return self._outbox.end(self, whole=False)

    @property
    def check(self) -> int:
        """See frames.Grown."""
        return frames.checksum_of_pieces((at, payload.nbytes, crc) for at, (payload, crc) in self.pieces.items())

    def whole(self) -> Part:
        """The part as one message."""
        joined = memoryview(b"".join(self.pieces[at][0] for at in sorted(self.pieces)))
        return Part(self.outgoing.transfer.id, self.block, self.group, joined)


@dataclass(slots=True)
class OutboxStats:
    """Parts by outcome: "sent"; "refused" by the receiver; "dropped" because time or memory was used up. bytes_sent: of
    acknowledged parts. grown: of the parts that were sent, those in pieces."""

    parts: dict[str, int] = field(default_factory=dict)
    bytes_sent: int = 0
    grown: int = 0

    def count(self, outcome: str, n: int = 1) -> None:
        self.parts[outcome] = self.parts.get(outcome, 0) + n


class Outbox:
    """Thread-safe. max_bytes: bound on all parts. connect(address): opens a link; raises Refused, OSError, WireError,
    ConfigError."""

    def __init__(self, facts: StoreFacts, max_bytes: int, connect: Callable[[str], Link]):
        self._facts = facts
        self._max_bytes = max_bytes
        self._connect = connect
        self._changed = threading.Condition()
        self._open: dict[str, Outgoing] = {}
        self._queues: dict[str, deque[Part]] = {}  # by channel
        self._senders: dict[str, threading.Thread] = {}  # by address
        self._links: set[Link] = set()
        self._closing = False
        self.num_bytes = 0
        self.stats = OutboxStats()

    # -- the scheduler's side ------------------------------------------------------------------------------------

    def open(self, transfer: Transfer) -> bool:
        """Begins a transfer. False if its id is in use, or there are too many transfers or addresses."""
        with self._changed:
            self._expire()
            if self._closing or transfer.id in self._open or len(self._open) >= MAX_OPEN:
                return False
            if transfer.address and transfer.address not in self._senders and len(self._senders) >= MAX_SENDERS:
                return False
            channel = transfer.address or transfer.id
            self._open[transfer.id] = Outgoing(transfer, channel, time.monotonic() + transfer.seconds)
            self._queues.setdefault(channel, deque())
            if transfer.address and transfer.address not in self._senders:
                thread = threading.Thread(target=self._deliver, args=(channel,), name="kv-push", daemon=True)
                self._senders[transfer.address] = thread
                thread.start()
            return True

    @property
    def room(self) -> int:
        """Bytes of parts that can be put now. Held transfers that no engine has asked for make room for new ones."""
        with self._changed:
            self._expire()
            return self._max_bytes - self.num_bytes + sum(o.num_bytes for o in self._open.values() if self._yields(o))

    def wait(self, room: int, timeout: float) -> None:
        """Waits until there is room for so many bytes, at most `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._max_bytes - self.num_bytes >= room, timeout)

    def is_open(self, transfer: str) -> bool:
        """Whether parts of the transfer are still wanted."""
        with self._changed:
            self._expire()
            return transfer in self._open

    def put(self, transfer: str, block: StoredBlock, group: int, payload: memoryview) -> None:
        """Takes over a part, which must not be written to any more. Ignored if the transfer is over."""
        with self._changed:
            outgoing = self._open.get(transfer)
            if outgoing is None:
                return
            self._reserve(outgoing, payload.nbytes)
            self._queues[outgoing.channel].append(Part(transfer, block, group, payload.cast("B")))
            self._changed.notify_all()

    def _reserve(self, outgoing: Outgoing, num_bytes: int) -> None:
        for other in [o for o in self._open.values() if self._yields(o) and o is not outgoing]:
            if self.num_bytes + num_bytes <= self._max_bytes:
                break
            self._drop(other)
        outgoing.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def grow(self, transfer: str, block: StoredBlock, group: int, num_bytes: int) -> Growing | None:
        """Begins a part that comes in pieces, with room for all of them; None if the transfer is over."""
        with self._changed:
            outgoing = self._open.get(transfer)
            if outgoing is None:
                return None
            self._reserve(outgoing, num_bytes)
            outgoing.growing += 1
            return Growing(self, outgoing, block, group, num_bytes)

    def put_piece(self, growing: Growing, offset: int, payload: memoryview) -> None:
        """See Growing.add."""
        crc, outgoing = zlib.crc32(payload), growing.outgoing
        with self._changed:
            if growing.over or self._open.get(outgoing.transfer.id) is not outgoing:
                return
            growing.pieces[offset] = payload, crc
            part = Part(outgoing.transfer.id, growing.block, growing.group, payload, offset, growing, crc)
            self._queues[outgoing.channel].append(part)
            self._changed.notify_all()

    def end(self, growing: Growing, whole: bool) -> bool:
        """See Growing.seal and Growing.drop. False if it is over."""
        outgoing = growing.outgoing
        with self._changed:
            if growing.over or self._open.get(outgoing.transfer.id) is not outgoing:
                growing.over, over = True, growing.over
                return not over
            growing.over = True
            outgoing.growing -= 1
            queue = self._queues[outgoing.channel]
            if whole:
                outgoing.sealed += 1
                queue.append(Part(outgoing.transfer.id, growing.block, growing.group, grown=growing))
            else:
                outgoing.num_bytes -= growing.num_bytes
                self.num_bytes -= growing.num_bytes
                self._queues[outgoing.channel] = deque(part for part in queue if part.grown is not growing)
            self._end(outgoing)
            self._changed.notify_all()
            return True

    def finish(self, transfer: str) -> None:
        """No more parts will be put. A held transfer is kept for its seconds from now."""
        with self._changed:
            if outgoing := self._open.get(transfer):
                outgoing.ended, outgoing.deadline = True, time.monotonic() + outgoing.transfer.seconds
                self._end(outgoing)
                self._changed.notify_all()

    def _end(self, outgoing: Outgoing) -> None:
        if outgoing.ended and not outgoing.growing + outgoing.sealed:
            self._queues[outgoing.channel].append(Part(outgoing.transfer.id))

    def _yields(self, outgoing: Outgoing) -> bool:
        held = not outgoing.claimed and not outgoing.transfer.address
        return held and outgoing.ended and not outgoing.growing

    def _expire(self) -> None:
        now = time.monotonic()
        for outgoing in [o for o in self._open.values() if o.deadline < now]:
            self._drop(outgoing)

    def _drop(self, outgoing: Outgoing) -> None:
        """Forgets a transfer and its parts; those that are just being sent are ignored when they come back."""
        del self._open[outgoing.transfer.id]
        self.num_bytes -= outgoing.num_bytes
        queue = self._queues.get(outgoing.channel, deque())
        left = deque(part for part in queue if part.transfer != outgoing.transfer.id)
        self.stats.count("dropped", sum(map(_counts, queue)) - sum(map(_counts, left)) + outgoing.growing)
        if outgoing.transfer.address and outgoing.ended:
            left.append(Part(outgoing.transfer.id))  # its receiver need not wait for the rest
        self._queues[outgoing.channel] = left
        if not outgoing.transfer.address:
            self._queues.pop(outgoing.channel, None)
        self._changed.notify_all()

    # -- the threads' side ---------------------------------------------------------------------------------------

    def claim(self, transfer: str) -> bool:
        """Whether a held transfer of this id can be sent; its receiver has asked for it. For one receiver at a time."""
        with self._changed:
            self._expire()
            outgoing = self._open.get(transfer)
            if outgoing is None or outgoing.transfer.address or outgoing.claimed:
                return False
            outgoing.claimed = True
            return True

    def serve(self, link: Link, transfer: str) -> None:
        """Sends a claimed transfer over a link. Raises OSError, WireError."""
        try:
            self._pour(link, transfer, lambda: transfer not in self._open)
        finally:
            with self._changed:
                if outgoing := self._open.get(transfer):
                    outgoing.claimed = False

    def _deliver(self, address: str) -> None:
        """Sends all transfers to an address, until there have been none for a while."""
        pause, used = FIRST_PAUSE, time.monotonic()
        while True:
            with self._changed:
                self._expire()
                if any(o.channel == address for o in self._open.values()):
                    used = time.monotonic()
                if self._closing or time.monotonic() - used > IDLE_SECONDS:
                    self._senders.pop(address, None)
                    self._queues.pop(address, None)
                    return
                self._changed.wait_for(lambda: self._closing or self._queues.get(address), POLL_SECONDS)
                if not self._queues.get(address):
                    continue
            try:
                link = self._connect(address)
                pause = FIRST_PAUSE
                self._pour(link, address, lambda: False)
                continue
            except Refused as refused:
                if refused.reason != frames.UNREADY:
                    log.warning("%s takes no blocks from this engine: %s", address, refused)
                    self._give_up(address)
            except ConfigError as error:
                log.warning("no blocks can be sent to %s: %s", address, error)
                self._give_up(address)
            except (OSError, WireError) as error:
                log.info("blocks for %s wait: %s", address, error)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _give_up(self, address: str) -> None:
        with self._changed:
            for outgoing in [o for o in self._open.values() if o.channel == address]:
                self._drop(outgoing)
            self._queues[address] = deque()

    def _pour(self, link: Link, channel: str, over: Callable[[], bool]) -> None:
        """Sends the parts of a channel until nothing is left of it for a while (`over`: for ever). Parts that were not
        acknowledged are queued again."""
        with self._changed:
            self._links.add(link)
        sender: PartSender | None = None
        try:
            sender = PartSender(link, self._facts)
            used = time.monotonic()
            while not self._closing and (sender.under_way or not over()):
                part = None if sender.full else self._pop(channel, 0.0 if sender.under_way else POLL_SECONDS)
                if part:
                    sender.send(part)
                elif sender.under_way:
                    self._settle(*sender.acknowledged())
                elif time.monotonic() - used > IDLE_SECONDS:
                    return
                if part or sender.under_way:
                    used = time.monotonic()
        finally:
            with self._changed:
                self._links.discard(link)
                if sender and channel in self._queues:
                    still = [p for p in sender.under_way if p.transfer in self._open or p.block is None]
                    self._queues[channel].extendleft(reversed(still))
            (sender or link).close()

    def _pop(self, channel: str, timeout: float) -> Part | None:
        with self._changed:
            self._expire()
            if timeout:
                self._changed.wait_for(lambda: self._closing or self._queues.get(channel), timeout)
            queue = self._queues.get(channel)
            return queue.popleft() if queue else None

    def _settle(self, part: Part, answer: int) -> None:
        with self._changed:
            outgoing = self._open.get(part.transfer)
            if part.block is None:
                if outgoing:
                    del self._open[part.transfer]
                    self.num_bytes -= outgoing.num_bytes
                    if not outgoing.transfer.address:
                        self._queues.pop(outgoing.channel, None)
            elif outgoing and _counts(part):
                self._settle_part(outgoing, part, answer)
            if outgoing and part.block is not None and answer == frames.DROPPED:
                self._drop(outgoing)
            self._changed.notify_all()

    def _settle_part(self, outgoing: Outgoing, part: Part, answer: int) -> None:
        grown = part.grown if isinstance(part.grown, Growing) else None
        if grown:
            outgoing.sealed -= 1
        if grown and answer == frames.INCOMPLETE:
            self._queues[outgoing.channel].appendleft(grown.whole())
        else:
            num_bytes = grown.num_bytes if grown else part.payload.nbytes
            outgoing.num_bytes -= num_bytes
            self.num_bytes -= num_bytes
            self.stats.count("sent" if answer == frames.KEPT else "refused")
            self.stats.bytes_sent += num_bytes * (answer == frames.KEPT)
            self.stats.grown += answer == frames.KEPT and grown is not None
        if grown:
            self._end(outgoing)

    def close(self, timeout: float) -> None:
        """Ends the threads; sends until the timeout (seconds) what has an address."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: not self._pushing(), max(0.0, deadline - time.monotonic()))
            self._closing = True
            for link in self._links:
                link.shut()
            threads = list(self._senders.values())
            self._changed.notify_all()
        for thread in threads:
            thread.join(2.0)

    def _pushing(self) -> bool:
        """Whether there is something to send that needs no more parts."""
        sealed = any(o.ended and o.sealed and o.transfer.address in self._senders for o in self._open.values())
        return sealed or any(self._queues.get(address) for address in self._senders)


def _counts(part: Part) -> bool:
    """Whether it stands for a whole part in the statistics."""
    return part.block is not None and part.offset < 0
