"""Targets: what processes say to each other, and what lies on disk between two lives."""

from __future__ import annotations

import io
import socket
import struct
from contextlib import suppress
from functools import partial

from kvasir.engine import wire
from kvasir.errors import KvasirError
from kvasir.kv.peers import wire as tier
from kvasir.kv.tiers import record
from kvasir.kv.transfer.block_socket import BlockSocket, WireError
from kvasir.store.manifests import Manifests
from kvasir.store.names import parse_name
from kvasir.text import template_worker
from tests.fuzz.mutate import mutate_json
from tests.fuzz.target import Target, scratch
from tests.kv._tiers import FACTS, blocks_of

BLOCK = blocks_of(2)[1]
ASKED = {tier.HAS: tier.HAS_BYTES, tier.LOAD: tier.LOAD_BYTES}


def read_engine(data: bytes) -> None:
    """What decodes is a message, and encodes to the same."""
    for decode in (wire.decode_command, wire.decode_event):
        try:
            message = decode(data)
        except (ValueError, KvasirError):  # msgspec's own errors are ValueErrors
            continue
        assert wire.encode(decode(wire.encode(message))) == wire.encode(message)
        if isinstance(message, wire.ErrorReport):
            assert isinstance(wire.to_error(message), KvasirError)


def read_tier(data: bytes) -> None:
    """A frame from a socket, and the bodies that it may have."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        link = BlockSocket(ours)
        link.begin(5)
        kind, length = link.head(ASKED)
        assert length <= ASKED[kind]
        body = link.body(length)
    if kind == tier.HAS:
        keys, group = tier.unpack_has(body)
        assert tier.pack_has(keys, group) == bytes(body)
        tier.unpack_held(bytes(body), len(keys))
    elif kind == tier.LOAD:
        block, group = tier.unpack_load(body)
        assert tier.unpack_load(tier.pack_load(block, group)) == (block, group)


def read_record(data: bytes) -> None:
    """A record gives the payload that it was sealed with, or nothing; no read goes beyond what it can have."""
    rest = memoryview(data)

    def fill(buffer: memoryview) -> None:
        nonlocal rest
        assert len(buffer) <= min(record.max_size(FACTS, 0), len(rest)), "read beyond the record"
        buffer[:], rest = rest[: len(buffer)], rest[len(buffer) :]

    payload = record.unseal(FACTS, BLOCK, 0, len(data), fill)
    assert record.seal(FACTS, BLOCK, 0, payload) + bytes(payload) == data


def read_manifest(data: bytes) -> None:
    folder = scratch() / "manifests"
    folder.mkdir(exist_ok=True)
    name = parse_name("m")
    (folder / f"{name.key}.json").write_bytes(data)
    entry = Manifests(folder).read(name)
    assert entry is not None and entry.parsed.key == name.key
    entry.conversation([{"role": "user", "content": "?"}])
    Manifests(folder).write(entry)
    assert Manifests(folder).read(name) == entry


def read_worker(data: bytes) -> None:
    """A frame as the workers of the sandbox read it."""
    with suppress(ValueError, RecursionError, struct.error):
        template_worker.read_frame(io.BytesIO(data))


TARGETS = {
    "engine_wire": Target(read_engine, words=("Add", "Abort", "Ask", "Stop", "Ready", "Fault", "Deltas", "Answer")),
    "tier_wire": Target(read_tier, refusals=(WireError,)),
    "record": Target(read_record, refusals=(record.Unusable,), words=(record.MAGIC,)),
    "manifest": Target(
        read_manifest,
        mutate=partial(
            mutate_json,
            words=tuple("name weights path format gguf size digest details template parameters messages stop".split()),
        ),
    ),
    "worker_frame": Target(read_worker),
}
