"""The record of a part as bytes, the same in a file and in a message.

    prefix   magic, format, bytes of header and payload, SHA-256 of everything else
    header   msgpack of everything that must match: namespace, parent, ids, group, the store's facts
    payload  the group's bytes

A reader knows the expected header and payload length. So it compares a record's header instead of trusting it, and no
record can make it allocate more than the expected size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import sha256

import msgspec

from kvasir.kv.tiers.block import ID_BYTES, MAX_BLOCK_SIZE, MAX_NAMESPACE, MAX_TEXT, StoredBlock, StoreFacts

MAGIC = b"kvasirkv"
FORMAT = 1
PREFIX = struct.Struct("<8sIIQ32s")
DIGEST_AT = PREFIX.size - 32
# Up to four bytes per character in UTF-8; 256 for the key, the numbers and msgpack's overhead.
MAX_HEADER = MAX_NAMESPACE + MAX_BLOCK_SIZE * ID_BYTES + 3 * MAX_TEXT * 4 + 256


class Unusable(Exception):
    """A part cannot be loaded. `reason`, one word, is counted:

    missing, truncated, corrupt, stale (other format or numerics version), foreign (other model, layout, namespace or
    block than its name), io, peer (no response), busy, closed, error.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Header(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The fields of a record's header, in their order."""

    namespace: bytes
    parent: bytes
    ids: bytes
    group: int
    model: str
    layout: str
    block_size: int
    num_bytes: int
    numerics: str


def _header(facts: StoreFacts, block: StoredBlock, group: int) -> bytes:
    part = facts.groups[group]
    names = (block.namespace, block.parent, block.ids, group)
    return msgspec.msgpack.encode(
        Header(*names, facts.model, part.layout, facts.block_size, part.num_bytes, facts.numerics)
    )


def _digest(head: bytes | bytearray, header: bytes | bytearray, payload: memoryview) -> bytes:
    """SHA-256 of the prefix up to the digest, the header and the payload."""
    total = sha256(head[:DIGEST_AT])
    total.update(header)
    total.update(payload)
    return total.digest()


def max_size(facts: StoreFacts, group: int) -> int:
    """Bytes of the longest record of a group."""
    return PREFIX.size + MAX_HEADER + facts.groups[group].num_bytes


def seal(facts: StoreFacts, block: StoredBlock, group: int, payload: memoryview) -> bytes:
    """Prefix and header of the record of `payload` (contiguous bytes), which follows them."""
    header = _header(facts, block, group)
    bare = PREFIX.pack(MAGIC, FORMAT, len(header), payload.nbytes, b"")[:DIGEST_AT]
    return bare + _digest(bare, header, payload) + header


def unseal(
    facts: StoreFacts, block: StoredBlock, group: int, size: int, fill: Callable[[memoryview], None]
) -> memoryview:
    """Reads and verifies a record of `size` bytes. Returns its payload, read-only.

    `fill(buffer)` fills the whole buffer with the next bytes, or raises. Raises Unusable if the record is not that of
    this block and group.
    """
    if size < PREFIX.size:
        raise Unusable("truncated")
    head = _read(PREFIX.size, fill)
    magic, version, header_bytes, payload_bytes, digest = PREFIX.unpack(head)
    if magic != MAGIC or header_bytes > MAX_HEADER:
        raise Unusable("corrupt")
    if version != FORMAT:
        raise Unusable("stale")
    if size != PREFIX.size + header_bytes + payload_bytes:
        raise Unusable("truncated")
    expected = _header(facts, block, group)
    header = _read(header_bytes, fill)
    if header != expected:
        raise Unusable(_difference(header, facts))
    if payload_bytes != facts.groups[group].num_bytes:
        raise Unusable("corrupt")
    payload = memoryview(_read(payload_bytes, fill))
    if _digest(head, header, payload) != digest:
        raise Unusable("corrupt")
    return payload.toreadonly()


def _read(num_bytes: int, fill: Callable[[memoryview], None]) -> bytearray:
    buffer = bytearray(num_bytes)
    fill(memoryview(buffer))
    return buffer


def _difference(header: bytes | bytearray, facts: StoreFacts) -> str:
    """The reason of Unusable for a header that differs from the expected one."""
    try:
        found = msgspec.msgpack.decode(header, type=Header)
    except (msgspec.DecodeError, ValueError):
        return "corrupt"
    return "stale" if found.model == facts.model and found.numerics != facts.numerics else "foreign"
