"""Makes the tier of an engine: host memory, folder and peer, and the facts that identify and describe its blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.config import EngineConfig, EngineOptions
from kvasir.environment import contents_dir, user_path
from kvasir.errors import ConfigError
from kvasir.kv.peers.server import PeerServer
from kvasir.kv.peers.tier import PeerTier, check_peer
from kvasir.kv.tiers.block import GroupFacts, StoreFacts, layout, short
from kvasir.kv.tiers.connector import KVConnector
from kvasir.kv.tiers.disk import DiskTier
from kvasir.kv.tiers.folder import make_private
from kvasir.kv.tiers.host import HostTier
from kvasir.kv.tiers.joint import JointTier
from kvasir.kv.tiers.later import LaterTier
from kvasir.kv.transfer.link import Address, parse_address
from kvasir.kv.transfer.security import Credentials, read_key
from kvasir.models.overrides import read_overrides
from kvasir.speculation import Drafters
from kvasir.types import ModelInfo
from kvasir.weights.content import Contents
from kvasir.weights.find import find_model
from kvasir.weights.local import ModelFiles

if TYPE_CHECKING:
    from kvasir.layers.kv_cache import KVCache
    from kvasir.program.cache import NativeCache

SCAN_SECONDS = 2.0  # longest time for which the start waits for the folder to be listed
IDENTIFY_SECONDS = 0.5  # longest time for which the start waits for the weights to be identified


def identify(options: EngineOptions, config: EngineConfig, files: ModelFiles) -> Contents | None:
    """The identity of the weights by their content, for tiers and exchanges that outlive the process or leave it; None
    if there are none. Raises OSError."""
    if not (config.cache_dir or config.cache_peer or config.exchanges):
        return None
    weights = (*files.weights, *_drafter_files(config.drafters))
    return Contents(weights, contents_dir(), lambda digest: identity(options, config, files, digest))


def credentials_of(options: EngineOptions) -> Credentials:
    """What engines that exchange blocks over TCP know each other by. Raises ConfigError."""
    key, cert, authority = (
        user_path(name) if name else None for name in (options.transfer_key, options.transfer_cert, options.transfer_ca)
    )
    return Credentials(read_key(key) if key else b"", cert, authority)


def make_tier(
    options: EngineOptions,
    config: EngineConfig,
    info: ModelInfo,
    cache: KVCache | NativeCache,
    weights: Contents | None,
) -> KVConnector | None:
    """The configured tiers: host memory before disk before peer; None if there are none. weights: as `identify` makes
    it; the tiers close it. Raises ConfigError."""
    if not (config.cache_host or config.cache_dir or config.cache_peer):
        return None
    facts = StoreFacts("", info.numerics, config.block_size, group_facts(config, cache))
    tiers: list[KVConnector] = []
    server = None
    try:
        if config.cache_dir and weights:
            tiers.append(_disk(_path(config.cache_dir), config, facts, weights))
        if config.cache_peer and weights:
            tiers.append(_peer(parse_address(config.cache_peer), credentials_of(options), config, facts, weights))
        if config.cache_offer and config.cache_dir:
            server = PeerServer(parse_address(config.cache_offer), tiers[0], credentials_of(options))
    except ConfigError:
        for tier in tiers:
            tier.close(0.0)
        raise
    if config.cache_host:
        tiers.insert(0, HostTier(facts, config.cache_host, tiers[0] if config.cache_dir else None))
    return JointTier(tiers, server) if server or len(tiers) > 1 else tiers[0]


def _disk(folder: Path, config: EngineConfig, facts: StoreFacts, weights: Contents) -> LaterTier:
    """Raises ConfigError for an unusable folder."""
    share, patience = config.cache_write_share, SCAN_SECONDS
    make_private(folder)

    def open(facts: StoreFacts) -> DiskTier:
        disk = DiskTier(
            folder, facts, config.cache_disk,
            queue_bytes=config.save_bytes, load_bytes=config.load_bytes, share=share if share < 1 else None,
        )  # fmt: skip
        disk.wait_scanned(patience)
        return disk

    tier = LaterTier("disk", facts, weights, open)
    if weights.wait(IDENTIFY_SECONDS):
        tier.opened()
    patience = 0.0  # a tier that opens later delays no step
    return tier


def _peer(
    address: Address, credentials: Credentials, config: EngineConfig, facts: StoreFacts, weights: Contents
) -> LaterTier:
    """Raises ConfigError for an unusable address."""
    check_peer(address, credentials)

    def open(facts: StoreFacts) -> PeerTier:
        return PeerTier(address, facts, credentials=credentials, load_bytes=config.load_bytes)

    return LaterTier("peer", facts, weights, open)


def _path(name: str) -> Path:
    return user_path(name).absolute()


def identity(
    options: EngineOptions,
    config: EngineConfig,
    files: ModelFiles,
    digest: Callable[[Path], str],
) -> str:
    """A hash of the weights and of everything else, except the numerics version, that keys and values depend on.
    digest: of the content of a weight file.

    It includes the block size and the type of keys and values, so that engines that differ in them can share a folder,
    and what changes their angles: overrides of the config and LongRoPE's choice of factors. So can engines with other
    drafters, whose keys and values are in the same blocks.
    """
    ways = (config.dtype, options.quantize or "", config.executor, config.kv_dtype, str(config.block_size))
    changes = read_overrides(options.rope_scaling, options.hf_overrides).identity
    ways += tuple(way for way in (changes, "LongRoPE" * config.long_rope) if way)
    ways += _drafter(config.drafters, options, digest)
    configuration = files.config.read_bytes() if files.config else b""
    lines = [hashlib.sha256(configuration).hexdigest(), *ways, *map(digest, files.weights)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _drafter_files(drafters: Drafters) -> tuple[Path, ...]:
    return find_model(drafters.source).weights if drafters.weights and drafters.source else ()


def _drafter(drafters: Drafters, options: EngineOptions, digest: Callable[[Path], str]) -> tuple[str, ...]:
    if not drafters.weights:
        return ()
    own = (way for way in (options.draft_dtype, options.draft_quantize) if way)
    return (drafters.weights, *own, *map(digest, _drafter_files(drafters)))


def group_facts(config: EngineConfig, cache: KVCache | NativeCache) -> tuple[GroupFacts, ...]:
    """The layout and block size in bytes of each cache group, as stores compare them."""
    return tuple(_group_facts(config.kv_dtype, cache, group) for group in range(len(cache.groups)))


def _group_facts(kv_dtype: str, cache: KVCache | NativeCache, index: int) -> GroupFacts:
    parts = (
        layout(bank.kind.name, kv_dtype, bank.layers, bank.kind.facts, order) for bank, order in cache.orders(index)
    )
    return GroupFacts(short("; ".join(parts)), cache.export(index, 0).nbytes)
