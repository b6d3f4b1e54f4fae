"""Blocks, facts and payloads for the tests of the tiers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvasir.kv.tiers.block import GroupFacts, StoredBlock, StoreFacts, chain
from kvasir.kv.tiers.connector import Failed, KVConnector
from kvasir.kv.tiers.transfers import TransferMeter
from kvasir.plan import pack_ids

BLOCK_SIZE = 4
FACTS = StoreFacts("tiny@1", "n1", BLOCK_SIZE, (GroupFacts("full f32", 96), GroupFacts("window f32", 40)))


def facts_of(num_bytes: int) -> StoreFacts:
    return replace(FACTS, groups=(GroupFacts("full f32", num_bytes),))


def blocks_of(n: int, namespace: bytes = b"ns", first: int = 0) -> list[StoredBlock]:
    return chain(namespace, pack_ids(list(range(first, first + n * BLOCK_SIZE))), BLOCK_SIZE)


def payload_of(block: StoredBlock, group: int = 0, facts: StoreFacts = FACTS) -> bytes:
    """Bytes that only this part has."""
    seed = block.key + bytes([group])
    num_bytes = facts.groups[group].num_bytes
    return (seed * (num_bytes // len(seed) + 1))[:num_bytes]


def load(tier: KVConnector, block: StoredBlock, group: int = 0) -> bytes | str:
    """The part's bytes, or the reason why there are none."""
    result = tier.poll(tier.start_load(block, group), timeout=30.0)
    assert result is not None, "the load hangs"
    return result.reason if isinstance(result, Failed) else bytes(result)


def read_at(patch: pytest.MonkeyPatch, rate: float) -> None:
    """Tiers that are read have measured `rate` bytes per second."""
    patch.setattr(TransferMeter, "read_rate", lambda meter: rate)


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
