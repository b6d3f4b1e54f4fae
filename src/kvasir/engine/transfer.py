"""Makes an engine's exchange of blocks with other engines, from its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.config import EngineConfig, EngineOptions
from kvasir.engine.tier import credentials_of, group_facts
from kvasir.errors import ConfigError
from kvasir.kv.tiers.block import StoreFacts
from kvasir.kv.tiers.connector import KVConnector
from kvasir.kv.tiers.joint import JointTier
from kvasir.kv.transfer.exchange import BlockExchange, ExchangeOptions, peers_of
from kvasir.kv.transfer.link import parse_address
from kvasir.types import ModelInfo
from kvasir.weights.content import Contents

if TYPE_CHECKING:
    from kvasir.layers.kv_cache import KVCache
    from kvasir.program.cache import NativeCache

LEAST_PARTS = 8  # that must fit into the memory for blocks on their way


def make_exchange(
    options: EngineOptions,
    config: EngineConfig,
    info: ModelInfo,
    cache: KVCache | NativeCache,
    weights: Contents | None,
) -> BlockExchange | None:
    """The exchange that the options ask for, which closes `weights`; None without one. Raises ConfigError."""
    if not config.exchanges or weights is None:
        return None
    groups = group_facts(config, cache)
    facts = StoreFacts("", info.numerics, config.block_size, groups)
    needed = LEAST_PARTS * max(group.num_bytes for group in groups)
    if config.transfer_bytes < needed:
        raise ConfigError(
            f"transfer_memory allows {config.transfer_bytes} bytes in each direction, less than {LEAST_PARTS} blocks",
            f"give at least {2 * needed}, or a smaller block_size",
        )
    chosen = ExchangeOptions(
        listen=parse_address(options.transfer_listen) if options.transfer_listen else None,
        peers=peers_of(options.transfer_peer or ()),
        credentials=credentials_of(options),
        max_bytes=config.transfer_bytes,
        sends=config.role != "decode",
        takes=config.role != "prefill",
    )
    return BlockExchange(facts, weights, chosen)


def with_inbox(tier: KVConnector | None, exchange: BlockExchange) -> KVConnector:
    """The tier from which the scheduler fetches: the engine's own, then the inbox."""
    return JointTier([tier, exchange.inbox]) if tier else exchange.inbox
