"""Parts over a greeted link: `send_parts` at one end, `receive_parts` at the other. At most WINDOW parts are on their
way, so that one end hashes and copies while the other one does.

Over a socket file the bytes of parts lie in memory that both ends share: the sender copies a part into a free slot, the
receiver copies it out, checks its copy, and says so. The memory is sealed: neither end can make it shorter while the
other one reads or writes it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import zlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvasir.kv.tiers.block import StoredBlock, StoreFacts
from kvasir.kv.transfer import frames
from kvasir.kv.transfer.block_socket import FRAME, WireError
from kvasir.kv.transfer.frames import DROPPED, INCOMPLETE, KEPT, WINDOW, Part
from kvasir.kv.transfer.link import Link

EXCHANGE_SECONDS = 20.0  # for one part to be sent and acknowledged
IDLE_SECONDS = 300.0  # for which a link may be silent
POLL_SECONDS = 0.2  # between looks whether to end

SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class Receives(Protocol):
    """What a receiver does with parts and pieces, see Inbox."""

    def keep(self, transfer: str, block: StoredBlock, group: int, payload: memoryview) -> bool: ...

    def piece(
        self, transfer: str, block: StoredBlock, group: int, offset: int, payload: memoryview, crc: int
    ) -> int: ...

    def seal(self, transfer: str, block: StoredBlock, group: int, check: int) -> int: ...

    def done(self, transfer: str) -> None: ...


class Slots:
    """The sender's end of the shared memory: WINDOW slots, used in turn. Raises OSError where the system has none."""

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("kvasir-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._next = 0
        try:
            os.ftruncate(self.fd, WINDOW * num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._memory = mmap.mmap(self.fd, WINDOW * num_bytes)
        except OSError:
            os.close(self.fd)
            raise

    def write(self, payload: memoryview) -> int:
        """Copies a part into the next slot; returns its number."""
        slot, self._next = self._next, (self._next + 1) % WINDOW
        at = slot * self.num_bytes
        self._memory[at : at + payload.nbytes] = payload
        return slot

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class SharedSlots:
    """The receiver's end of the shared memory of a descriptor, which it takes over. Raises WireError if it is not
    sealed or has another size."""

    def __init__(self, fd: int, num_bytes: int, count: int, largest: int):
        """num_bytes, count: of slots, as the sender says. largest: bytes of the largest part."""
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
            if not sealed or (num_bytes, count) != (largest, WINDOW) or os.fstat(fd).st_size != count * num_bytes:
                raise WireError("the memory to share is malformed")
            self._memory = mmap.mmap(fd, count * num_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            raise WireError("the memory to share cannot be used") from None
        finally:
            os.close(fd)
        self._num_bytes = num_bytes

    def read(self, slot: int, num_bytes: int) -> memoryview:
        """A copy of a part."""
        if slot >= WINDOW:
            raise WireError("there is no such slot")
        at = slot * self._num_bytes
        return memoryview(self._memory[at : at + num_bytes])

    def close(self) -> None:
        self._memory.close()


class PartSender:
    """The sender's end of a link. Not thread-safe. facts: of the parts."""

    def __init__(self, link: Link, facts: StoreFacts):
        self.link = link
        self._slots: Slots | None = None
        self.under_way: deque[Part] = deque()  # sent, and not acknowledged yet
        if link.local and hasattr(os, "memfd_create"):
            self._slots = Slots(max(group.num_bytes for group in facts.groups))
            self._share(self._slots)

    def _share(self, slots: Slots) -> None:
        body = frames.SHARED.pack(slots.num_bytes, WINDOW)
        self.link.begin(EXCHANGE_SECONDS)
        self.link.sock.settimeout(EXCHANGE_SECONDS)
        message = FRAME.pack(frames.SHARE, len(body)) + body
        if socket.send_fds(self.link.sock, [message], [slots.fd]) != len(message):
            raise WireError("the descriptor was sent in parts")

    @property
    def full(self) -> bool:
        """Whether an acknowledgement must be read before the next part is sent."""
        return len(self.under_way) >= WINDOW

    def send(self, part: Part) -> None:
        """Sends a part, or the end of its transfer. Raises OSError."""
        self.link.begin(EXCHANGE_SECONDS)
        self.under_way.append(part)
        if part.block is None:
            self.link.send(frames.DONE, part.transfer.encode())
            return
        name = part.name()
        if part.grown and part.seals:
            self.link.send(frames.SEAL, frames.PART_HEAD.pack(part.grown.check, len(name)), name)
            return
        if part.offset < 0:
            check, span, kinds = frames.checksum(name, part.payload), b"", (frames.PART, frames.SLOT)
        else:
            place = part.offset, part.payload.nbytes
            check, span = frames.checksum_of_piece(name, *place, part.crc), frames.SPAN.pack(*place)
            kinds = (frames.PIECE, frames.SLICE)
        if self._slots:
            slot = self._slots.write(part.payload)
            self.link.send(kinds[1], frames.SLOT_HEAD.pack(slot, check, len(name)), span, name)
        else:
            self.link.send(kinds[0], frames.PART_HEAD.pack(check, len(name)), span, name, part.payload)

    def acknowledged(self) -> tuple[Part, int]:
        """Waits for the acknowledgement of the oldest part; returns it and what became of it: DROPPED, KEPT, or
        INCOMPLETE for the end of a grown one. Raises OSError, WireError."""
        self.link.begin(EXCHANGE_SECONDS)
        _, length = self.link.head({frames.TAKEN: 1})
        body = self.link.body(length)
        part, answer = self.under_way[0], body[0] if body else -1
        if answer not in (DROPPED, KEPT) and not (answer == INCOMPLETE and part.seals):
            raise WireError("the acknowledgement is malformed")
        return self.under_way.popleft(), answer

    def close(self) -> None:
        """Closes the link and gives the memory back."""
        self.link.close()
        if self._slots:
            self._slots.close()


class PartReceiver:
    """The receiver's end of a link: reads parts, and passes them on to `receives`."""

    def __init__(self, link: Link, facts: StoreFacts, receives: Receives):
        self._link = link
        self._facts = facts
        self._receives = receives
        largest = max(group.num_bytes for group in facts.groups)
        self._bounds = {
            frames.PART: frames.PART_HEAD.size + frames.NAME_BYTES + largest,
            frames.SLOT: frames.SLOT_HEAD.size + frames.NAME_BYTES,
            frames.PIECE: frames.PART_HEAD.size + frames.SPAN.size + frames.NAME_BYTES + largest,
            frames.SLICE: frames.SLOT_HEAD.size + frames.SPAN.size + frames.NAME_BYTES,
            frames.SEAL: frames.PART_HEAD.size + frames.NAME_BYTES,
            frames.DONE: frames.MAX_ID,
        }
        self._largest = largest
        self._shared: SharedSlots | None = None

    def run(self, until: Callable[[str], bool] = lambda transfer: False) -> None:
        """Receives until the end of a transfer for which `until` holds. Raises OSError or WireError when the link
        ends."""
        try:
            kind, length = self._first()
            while True:
                self._link.begin(EXCHANGE_SECONDS)
                if kind == frames.DONE:
                    transfer = frames.read_id(self._link.body(length))
                    self._receives.done(transfer)
                    self._link.send(frames.TAKEN, bytes((KEPT,)))
                    if until(transfer):
                        return
                else:
                    self._link.send(frames.TAKEN, bytes((self._part(kind, length),)))
                kind, length = self._head()
        finally:
            if self._shared:
                self._shared.close()

    def _head(self) -> tuple[int, int]:
        self._link.begin(IDLE_SECONDS)
        return self._link.head(self._bounds)

    def _first(self) -> tuple[int, int]:
        """The head of the first frame after those that share memory."""
        if not self._link.local:
            return self._head()
        self._link.sock.settimeout(IDLE_SECONDS)
        head, found, _, _ = socket.recv_fds(self._link.sock, FRAME.size, 1)
        try:
            self._link.begin(EXCHANGE_SECONDS)
            if not head:
                raise WireError("the sender has disconnected")
            kind, length = FRAME.unpack(head + self._link.body(FRAME.size - len(head)))
            if kind != frames.SHARE:
                if kind not in self._bounds or length > self._bounds[kind]:
                    raise WireError(f"a frame of kind {kind} and {length} bytes")
                return kind, length
            if length != frames.SHARED.size or not found:
                raise WireError("the memory to share is missing")
            slot_bytes, count = frames.SHARED.unpack(self._link.body(length))
            self._shared = SharedSlots(found.pop(), slot_bytes, count, self._largest)
        finally:
            for fd in found:
                os.close(fd)
        return self._head()

    def _part(self, kind: int, length: int) -> int:
        """Reads a part, a piece of one or its end; returns the answer. Raises WireError for an invalid one; a wrong
        checksum is one: the sender sends the part again over a new link."""
        head = frames.SLOT_HEAD if kind in (frames.SLOT, frames.SLICE) else frames.PART_HEAD
        span_bytes = frames.SPAN.size if kind in (frames.PIECE, frames.SLICE) else 0
        if length < head.size + span_bytes:
            raise WireError("a part without a name")
        *slot, check, name_bytes = head.unpack(self._link.body(head.size))
        span = frames.SPAN.unpack(self._link.body(span_bytes)) if span_bytes else None
        rest = length - head.size - span_bytes - name_bytes
        if name_bytes > frames.NAME_BYTES or rest < 0:
            raise WireError("the name of a part is out of bounds")
        packed = self._link.body(name_bytes)
        name = frames.read_name(packed, self._facts)
        to, size = (name.transfer, name.block, name.group), self._facts.groups[name.group].num_bytes
        if kind == frames.SEAL:
            if rest:
                raise WireError("the end of a part has bytes")
            return self._receives.seal(*to, check)
        if span is None:
            payload = self._payload(slot, rest, size)
            if frames.checksum(packed, payload) != check:
                raise WireError("a part was damaged on its way")
            return KEPT if self._receives.keep(*to, payload.toreadonly()) else DROPPED
        offset, num_bytes = span
        if not 0 < num_bytes <= size - offset:
            raise WireError("a piece lies outside its part")
        payload = self._payload(slot, rest, num_bytes)
        crc = zlib.crc32(payload)
        if frames.checksum_of_piece(packed, offset, num_bytes, crc) != check:
            raise WireError("a piece was damaged on its way")
        return self._receives.piece(*to, offset, payload, crc)

    def _payload(self, slot: list[int], rest: int, num_bytes: int) -> memoryview:
        if rest != (0 if slot else num_bytes):
            raise WireError("a part has another size than was declared")
        if not slot:
            return memoryview(self._link.body(num_bytes))
        if self._shared is None:
            raise WireError("there is no shared memory")
        return self._shared.read(slot[0], num_bytes)
