"""A subscriber of KV cache events, written from the published definition of vLLM's messages; for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvasir.engine.kv_events import KvEvents

ExtraKeys = list[list[Any] | None]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """All fields of vLLM's, none of them ignored."""

    block_hashes: Sequence[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: Sequence[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


class Mirror:
    """What a router knows of a cache: its blocks, each with its parent, ids and extra keys."""

    def __init__(self) -> None:
        self.blocks: dict[bytes | int, tuple[Any, tuple[int, ...], Any, str | None]] = {}
        self.number = -1
        self.rank: int | None = None

    def apply(self, number: int, payload: bytes) -> None:
        """Raises AssertionError if numbers are missing or hashes do not follow one another."""
        assert number == self.number + 1, f"batch {number} came after {self.number}"
        batch = decode(payload)
        self.number, self.rank = number, batch.data_parallel_rank
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.blocks.clear()
                case BlockRemoved():
                    for one in event.block_hashes:
                        del self.blocks[one]
                case BlockStored():
                    self._store(event)

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert parent is None or parent in self.blocks, "a block came before the one it follows"
        assert len(event.token_ids) == size * len(event.block_hashes) and event.medium == "GPU"
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        for i, one in enumerate(event.block_hashes):
            assert one not in self.blocks, "a block came twice"
            ids, extra = tuple(event.token_ids[i * size : (i + 1) * size]), (event.extra_keys or {i: None})[i]
            self.blocks[one] = parent, ids, extra, event.lora_name
            parent = one

    def prefixes(self) -> set[tuple[int, ...]]:
        """The ids from the beginning of a sequence to the end of each block."""
        return {self.prefix(one) for one in self.blocks}

    def prefix(self, one: bytes | int | None) -> tuple[int, ...]:
        if one is None:
            return ()
        parent, ids, *_ = self.blocks[one]
        return self.prefix(parent) + ids


class Subscriber:
    """Follows one publisher. topic: of the subscription."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "", most: int = 1000):
        self.context = zmq.asyncio.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.rcvhwm = most
        self.sub.subscribe(topic)
        self.sub.connect(endpoint)
        self.asks = self.context.socket(zmq.DEALER)
        if replay:
            self.asks.connect(replay)
        self.mirror = Mirror()

    @classmethod
    def of(cls, events: KvEvents, **more) -> Subscriber:
        return cls(events.endpoint, events.replay_endpoint, **more)

    async def batch(self) -> tuple[bytes, int, bytes]:
        """(topic, number, payload)"""
        topic, number, payload = await self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), payload

    async def replay(self, first: int) -> list[tuple[int, bytes]]:
        """The batches from this number on that the publisher still has."""
        await self.asks.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            empty, _, number, payload = await self.asks.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                return found
            found.append((int.from_bytes(number, "big"), payload))

    async def catch_up(self) -> None:
        """Applies all batches that the publisher has sent."""
        for number, payload in await self.replay(self.mirror.number + 1):
            self.mirror.apply(number, payload)

    def close(self) -> None:
        self.context.destroy(linger=0)
