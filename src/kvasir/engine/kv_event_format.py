"""KV cache events in the format of vLLM 0.33, msgpack: what routers such as llm-d's and Dynamo's read.

A batch is an array [time, events, rank]; an event is a map whose "type" is the name of its class. Optional fields are
left out where they are None. Made from the changes of a prefix cache (kv.changes) with their contents.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import msgspec

from kvasir.kv.changes import HASH_BYTES, BlockRun, CacheChanges

MEDIUM = "GPU"  # vLLM's name for the memory in which an engine computes, on a CPU as well
TOKENS_PER_BATCH = 1 << 16  # more come in several batches
HASH_END = 8  # bytes; the last of a hash are the number that stands for it, as in vLLM


class EventBatch(msgspec.Struct, array_like=True):
    """ts: seconds since 1970. data_parallel_rank: of the replica."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that follow one another in a sequence.

    block_hashes: of each. parent_block_hash: of the block before them, None at the beginning of a sequence. token_ids:
    of all blocks. lora_name: the adapters in effect from the first token on. extra_keys: for each block what its hash
    covers besides ids and parent: the name of the adapters, (identifier, index in the block) of inputs that begin in
    it, and, in the first block of a sequence, the salt and the identifier of other inputs; None for none."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str | tuple[str, int], ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks that are no longer in the cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def batches(changes: CacheChanges) -> Iterator[list[Event]]:
    """The events of changes, in order. A snapshot begins with an empty cache."""
    events: list[Event] = [AllBlocksCleared()] if changes.snapshot else []
    tokens = 0
    for run in changes.runs:
        if event := _event(run, changes.block_size):
            events.append(event)
            tokens += len(run.hashes) // HASH_BYTES * changes.block_size
        if tokens >= TOKENS_PER_BATCH:
            yield events
            events, tokens = [], 0
    if events:
        yield events


def _event(run: BlockRun, block_size: int) -> Event | None:
    """None for blocks that came without contents."""
    hashes = [_number(one) for one in run.each()]
    if not run.stored:
        return BlockRemoved(hashes, MEDIUM)
    if (of := run.contents) is None:
        return None
    parent, ids = None if of.first else _number(run.parent), array("i", of.ids).tolist()
    extra = _extra_keys(run, block_size)
    return BlockStored(hashes, parent, ids, block_size, None, MEDIUM, of.scope.adapters or None, extra)


def _number(of_block: bytes) -> int:
    return int.from_bytes(of_block[-HASH_END:], "big")


def _extra_keys(run: BlockRun, block_size: int) -> list[tuple[str | tuple[str, int], ...] | None] | None:
    of = run.contents
    assert of is not None
    each: list[list[str | tuple[str, int]]] = [[of.scope.adapters] if of.scope.adapters else [] for _ in run.each()]
    for index, mark in of.marks:
        each[index // block_size].append((mark.hex(), index % block_size))
    if of.first:
        each[0] += [text for text in (_published(of.scope.salt), of.scope.inputs.hex()) if text]
    return [tuple(keys) or None for keys in each] if any(each) else None


def _published(salt: str) -> str:
    """Of a salt: what the client gave if that is all (`0:SALT`, see Request.cache_salt); else a hash, since it has the
    name of a key."""
    length, _, given = salt.partition(":")
    return given if length == "0" else salt and sha256(salt.encode()).hexdigest()
