"""LaterTier: empty until the weights are identified, then the tier itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from kvasir.errors import ConfigError
from kvasir.kv.peers.server import PeerServer
from kvasir.kv.peers.tier import PeerTier
from kvasir.kv.tiers.disk import DiskTier
from kvasir.kv.tiers.later import LaterTier
from kvasir.kv.transfer.link import Address
from tests.kv._tiers import FACTS, blocks_of, load, payload_of, until

UNKNOWN = replace(FACTS, model="")


@dataclass
class Named:
    """An identity that a test sets."""

    value: str | None = None
    closed: bool = False

    def close(self) -> None:
        self.closed = True


def on_disk(folder, identity: Named) -> LaterTier:
    return LaterTier("disk", UNKNOWN, identity, lambda facts: DiskTier(folder, facts, 1 << 20))


def scanned(tier: LaterTier) -> None:
    disk = tier.opened()
    assert isinstance(disk, DiskTier) and disk.wait_scanned(30)


def test_it_is_empty_until_the_weights_are_identified(folder):
    identity, block = Named(), blocks_of(1)[0]
    tier = on_disk(folder, identity)
    assert tier.ask([block.key]) and tier.has([block.key]) == 0
    assert not tier.wants(block.key, 0) and not tier.save(block, 0, payload_of(block))
    assert tier.stats().num_parts == 0 and not folder.exists()

    identity.value = FACTS.model
    assert tier.wants(block.key, 0) and tier.save(block, 0, payload_of(block))
    until(lambda: tier.has([block.key]) == 1)
    assert load(tier, block) == payload_of(block)
    assert tier.facts == FACTS and set(tier.each()) == {"disk"}
    tier.close()
    assert identity.closed

    again = on_disk(folder, Named(FACTS.model))
    scanned(again)
    assert load(again, block) == payload_of(block)
    again.close()

    other = on_disk(folder, Named("other weights"))
    scanned(other)
    assert other.has([block.key]) == 0 and load(other, block) == "missing"
    other.close()


@pytest.mark.parametrize("known", [False, True])
def test_a_closed_one_opens_no_more(folder, known):
    identity = Named(FACTS.model if known else None)
    tier = on_disk(folder, identity)
    tier.close()
    identity.value = FACTS.model
    assert tier.opened() is None and not folder.exists()


def test_one_that_cannot_open_stays_empty(caplog):
    def fails(facts):
        raise ConfigError("no folder")

    tier = LaterTier("disk", UNKNOWN, Named(FACTS.model), fails)
    block = blocks_of(1)[0]
    assert tier.has([block.key]) == 0 and not tier.save(block, 0, payload_of(block))
    assert caplog.text.count("no folder") == 1
    tier.close()


def test_an_announced_end_is_passed_on_to_a_tier_that_opens_later(folder):
    identity = Named()
    tier = on_disk(folder, identity)
    tier.ending()
    identity.value = FACTS.model
    disk = tier.opened()
    assert isinstance(disk, DiskTier) and disk._ending
    tier.close()


@pytest.mark.usefixtures("hurry")
def test_peers_find_each_other_once_both_are_identified(folder, path):
    block, own, other = blocks_of(1)[0], Named(), Named()
    disk = on_disk(folder, own)
    server = PeerServer(Address(path), disk)
    peer = LaterTier("peer", UNKNOWN, other, lambda facts: PeerTier(Address(path), facts))
    other.value = FACTS.model
    peer.ask([block.key], timeout=5.0)
    assert peer.has([block.key]) == 0, "the server does not know yet what its weights are"

    own.value = FACTS.model
    assert disk.save(block, 0, payload_of(block))
    until(lambda: disk.has([block.key]) == 1)
    until(lambda: peer.ask([block.key], timeout=5.0) and peer.has([block.key]) == 1)
    assert load(peer, block) == payload_of(block)
    peer.close()
    server.close()
    disk.close()
