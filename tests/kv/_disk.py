"""Disk tiers and their folders, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvasir.kv.tiers import record
from kvasir.kv.tiers.block import StoredBlock, StoreFacts
from kvasir.kv.tiers.disk import DiskTier, file_key
from tests.kv._tiers import FACTS, blocks_of, payload_of

ROOM = 1 << 20


@contextmanager
def opened(folder: Path, facts: StoreFacts = FACTS, max_bytes: int = ROOM, **bounds: int) -> Iterator[DiskTier]:
    tier = DiskTier(folder, facts, max_bytes, **bounds)
    try:
        assert tier.wait_scanned(30)
        yield tier
    finally:
        tier.close(30.0)


def save(tier: DiskTier, block: StoredBlock, group: int = 0) -> None:
    assert tier.save(block, group, payload_of(block, group, tier.facts))


def saved(tier: DiskTier) -> int:
    return tier.stats().saves.get("saved", 0)


def fill(folder: Path, blocks: list[StoredBlock], facts: StoreFacts = FACTS, max_bytes: int = ROOM) -> None:
    with opened(folder, facts, max_bytes) as tier:
        for block in blocks:
            save(tier, block)
    assert tier.stats().saves == {"saved": len(blocks)}


def path_of(folder: Path, block: StoredBlock, group: int = 0, model: str = FACTS.model) -> Path:
    key = file_key(block.key, model).hex()
    return folder / key[:2] / f"{key}.{group}"


def parts(folder: Path) -> list[Path]:
    return [p for p in folder.glob("??/*") if p.is_file()]


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder, which must not change meanwhile."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def room_for(n: int, facts: StoreFacts) -> int:
    """Bytes of n files."""
    block = blocks_of(1)[0]
    payload = payload_of(block, 0, facts)
    return n * (len(record.seal(facts, block, 0, memoryview(payload))) + len(payload))
