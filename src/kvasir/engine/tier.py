"""Makes the tier of an engine: host memory, folder and peer, and the facts that identify and describe its blocks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.config import EngineConfig, EngineOptions
from kvasir.errors import ConfigError
from kvasir.kv.tiers.block import GroupFacts, StoreFacts, layout, short
from kvasir.kv.tiers.connector import KVConnector
from kvasir.kv.tiers.disk import DiskTier
from kvasir.kv.tiers.host import HostTier
from kvasir.kv.tiers.joint import JointTier
from kvasir.kv.tiers.peer import PeerServer, PeerTier
from kvasir.models.overrides import read_overrides
from kvasir.speculation import Drafters
from kvasir.types import ModelInfo
from kvasir.weights.content import blob_content
from kvasir.weights.find import find_model
from kvasir.weights.local import ModelFiles

if TYPE_CHECKING:
    from kvasir.layers.kv_cache import KVCache
    from kvasir.program.cache import NativeCache

SAMPLES = 16  # pieces of a weight file without a content hash that enter its identity, besides its size and time
SAMPLE_BYTES = 1 << 16
SCAN_SECONDS = 2.0  # longest time for which the start waits for the folder to be listed


def make_tier(
    options: EngineOptions,
    config: EngineConfig,
    files: ModelFiles,
    info: ModelInfo,
    cache: KVCache | NativeCache,
) -> KVConnector | None:
    """The configured tiers: host memory before disk before peer; None if there are none. Raises ConfigError."""
    if not (config.cache_host or config.cache_dir or config.cache_peer):
        return None
    facts = StoreFacts(identity(options, config, files), info.numerics, config.block_size, group_facts(config, cache))
    tiers: list[KVConnector] = []
    disk = server = None
    try:
        if config.cache_dir:
            share = config.cache_write_share if config.cache_write_share < 1 else None
            disk = DiskTier(
                _path(config.cache_dir), facts, config.cache_disk,
                queue_bytes=config.save_bytes, load_bytes=config.load_bytes, share=share,
            )  # fmt: skip
            tiers.append(disk)
            disk.wait_scanned(SCAN_SECONDS)
        if config.cache_peer:
            tiers.append(PeerTier(_path(config.cache_peer), facts, load_bytes=config.load_bytes))
        if config.cache_offer and disk:
            server = PeerServer(_path(config.cache_offer), disk)
    except ConfigError:
        for tier in tiers:
            tier.close(0.0)
        raise
    if config.cache_host:
        tiers.insert(0, HostTier(facts, config.cache_host, disk))
    return JointTier(tiers, server) if server or len(tiers) > 1 else tiers[0]


def _path(name: str) -> Path:
    return Path(name).expanduser().absolute()


def identity(
    options: EngineOptions,
    config: EngineConfig,
    files: ModelFiles,
    digest: Callable[[Path], str] | None = None,
) -> str:
    """A hash of the weights and of everything else, except the numerics version, that keys and values depend on.
    digest: of a weight file; by default `file_identity`, which may mean nothing on another machine.

    It includes the block size and the type of keys and values, so that engines that differ in them can share a folder,
    and what changes their angles: overrides of the config and LongRoPE's choice of factors. So can engines with other
    drafters, whose keys and values are in the same blocks.
    """
    ways = (config.dtype, options.quantize or "", config.executor, config.kv_dtype, str(config.block_size))
    changes = read_overrides(options.rope_scaling, options.hf_overrides).identity
    ways += tuple(way for way in (changes, "LongRoPE" * config.long_rope) if way)
    digest = digest or file_identity
    ways += _drafter(config.drafters, options, digest)
    configuration = files.config.read_bytes() if files.config else b""
    lines = [hashlib.sha256(configuration).hexdigest(), *ways, *map(digest, files.weights)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def weight_files(config: EngineConfig, files: ModelFiles) -> tuple[Path, ...]:
    """The files that the identity depends on: those of the model, and those of a drafter with weights."""
    return (*files.weights, *_drafter_files(config.drafters))


def _drafter_files(drafters: Drafters) -> tuple[Path, ...]:
    return find_model(drafters.source).weights if drafters.weights and drafters.source else ()


def _drafter(drafters: Drafters, options: EngineOptions, digest: Callable[[Path], str]) -> tuple[str, ...]:
    if not drafters.weights:
        return ()
    own = (way for way in (options.draft_dtype, options.draft_quantize) if way)
    return (drafters.weights, *own, *map(digest, _drafter_files(drafters)))


def file_identity(path: Path) -> str:
    """The content hash of a file from a store of blobs. Of any other a hash of its size, time and samples: a tier is
    used from the first request on, and hashing all of it would take longer than loading it."""
    if content := blob_content(path):
        return content
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        digest.update(f"{info.st_size} {info.st_mtime_ns}\n".encode())
        for i in range(SAMPLES):
            file.seek(max(0, info.st_size - SAMPLE_BYTES) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def group_facts(config: EngineConfig, cache: KVCache | NativeCache) -> tuple[GroupFacts, ...]:
    """The layout and block size in bytes of each cache group, as stores compare them."""
    return tuple(_group_facts(config.kv_dtype, cache, group) for group in range(len(cache.groups)))


def _group_facts(kv_dtype: str, cache: KVCache | NativeCache, index: int) -> GroupFacts:
    parts = (
        layout(bank.kind.name, kv_dtype, bank.layers, bank.kind.facts, order) for bank, order in cache.orders(index)
    )
    return GroupFacts(short("; ".join(parts)), cache.export(index, 0).nbytes)
