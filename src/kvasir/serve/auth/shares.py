"""Limits of keys that several servers share, without a process that counts for all.

Servers tell each other what they have used. Since that takes time, a server admits only what it has claimed before:
units that the others count as used until they are used or given back. The rules:

- A server claims a share of what is left as far as it knows, or what the request needs if that is more.
- It claims again only when all others have heard of its last claim. So two servers that claim at the same time have
  both known everything else.
- While it does not hear all others, it has a fixed share of the limit for itself.

So all servers together admit no more than the limit, but for what they claim at the very same moment: rounding up, less
than one unit for each server, or for each other server one request that needs more than a share. When servers lose each
other, each may once use its fixed share again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from kvasir.errors import LimitExceeded
from kvasir.serve.auth.buckets import SECOND, Bucket, drain, refusal, take, wait

FRESH_SECONDS = 3.0  # without news, after which another server counts as unheard
FORGOTTEN_SECONDS = 120.0
MOST_PEERS = 256
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class NotHeard(Exception):
    """The others have not heard of the last claim yet."""


class Told(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a server says of one limit of a key. used: units in all, since it started. spare: claimed units. recent:
    used units that have not drained from its fixed share."""

    used: _Count
    spare: _Count
    recent: _Count


class News(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """From a server. number: of this message. claim: of its last claim. heard: of each other server, the last claim
    that it has heard of. limits: by "key/limit", those of which anything is left."""

    server: Annotated[str, msgspec.Meta(max_length=64)]
    number: _Count
    claim: _Count
    heard: dict[str, _Count]
    limits: dict[str, Told]


@dataclass(slots=True)
class Peer:
    """Another server. at: when it was last heard, in nanoseconds. now: what it said last. before: the latest that it
    said of each limit."""

    at: int = 0
    number: int = 0
    claim: int = 0
    heard: dict[str, int] = field(default_factory=dict)
    now: dict[str, Told] = field(default_factory=dict)
    before: dict[str, Told] = field(default_factory=dict)


class Peers:
    """The servers that share limits. servers: how many there are, this one included. own: the name of this one.
    on_change: called when there is something to tell."""

    def __init__(self, own: str, servers: int, clock: Callable[[], int], on_change: Callable[[], None] = lambda: None):
        self.own, self.servers, self.clock, self.on_change = own, servers, clock, on_change
        self.claim = 0
        self._number = 0
        self._known: dict[str, Peer] = {}

    @property
    def fresh(self) -> dict[str, Peer]:
        """The others that are heard, by name."""
        since = self.clock() - FRESH_SECONDS * SECOND
        return {name: peer for name, peer in self._known.items() if peer.at >= since}

    @property
    def complete(self) -> bool:
        return len(self.fresh) >= self.servers - 1

    def know(self, claim: int) -> bool:
        """Whether all others have heard of a claim of this server."""
        return all(peer.heard.get(self.own, 0) >= claim for peer in self.fresh.values())

    def of_others(self, limit: str) -> list[Told]:
        """What the others say of a limit now."""
        return [told for peer in self.fresh.values() if (told := peer.now.get(limit))]

    def claimed(self) -> int:
        """Numbers a new claim."""
        self.claim += 1
        self.on_change()
        return self.claim

    def news(self, limits: dict[str, Told]) -> News:
        """What this server says now."""
        self._number += 1
        heard = {name: peer.claim for name, peer in self.fresh.items()}
        return News(self.own, self._number, self.claim, heard, limits)

    def take(self, news: News) -> dict[str, tuple[Told | None, Told]] | None:
        """Learns from another server. Returns what it said before of each limit, and says now; None for old news."""
        now = self.clock()
        for name in [n for n, peer in self._known.items() if peer.at < now - FORGOTTEN_SECONDS * SECOND]:
            del self._known[name]
        if news.server == self.own or len(self._known) > MOST_PEERS:
            return None
        peer = self._known.setdefault(news.server, Peer())
        if news.number <= peer.number:
            return None
        said = {name: (peer.before.get(name), told) for name, told in news.limits.items()}
        if news.claim != peer.claim:
            self.on_change()  # it waits for this server to have heard of its claim
        peer.at, peer.number, peer.claim, peer.heard, peer.now = now, news.number, news.claim, news.heard, news.limits
        peer.before |= news.limits
        return said


class SharedRate:
    """A limit per minute of one key. name: under which servers speak of it. what: its units, for messages."""

    def __init__(self, name: str, what: str, limit: int, peers: Peers):
        now = peers.clock()
        self.name, self._what, self._peers = name, what, peers
        self._all = Bucket(limit, at=now)  # what all servers have used, as far as this one knows
        self._own = Bucket(max(1, limit // peers.servers), at=now)  # what this one has used, in its fixed share
        self._used = self._spare = self._claim = 0
        self._idle = True  # nothing was used since spare units were last given back

    def limit(self, limit: int) -> None:
        """Applies a new limit."""
        self._all = Bucket(limit, self._all.used, self._all.at)
        self._own = Bucket(max(1, limit // self._peers.servers), self._own.used, self._own.at)

    def drained(self) -> tuple[Bucket, Bucket]:
        now = self._peers.clock()
        self._all, self._own = drain(self._all, now), drain(self._own, now)
        return self._all, self._own

    @property
    def effective(self) -> Bucket:
        """The bucket that decides at present."""
        return self._all if self._peers.complete else self._own

    def take(self, units: int, *, alone: bool = False) -> None:
        """Admits units. alone: within the fixed share. Raises LimitExceeded, NotHeard."""
        everything, own = self.drained()
        if alone or not self._peers.complete:
            if (delay := wait(own, units)) != 0:
                raise refusal(own, units, delay, self._what)
        elif self._spare < units:
            self._claim_more(units - self._spare, everything, units)
        self.use(units)

    def _claim_more(self, lack: int, everything: Bucket, units: int) -> None:
        others = sum(told.spare for told in self._peers.of_others(self.name))
        room = max(0, everything.room - self._spare - others)
        if lack > room:
            delay = wait(everything, units)
            raise refusal(everything, units, delay if delay is None else max(delay, SECOND), self._what)
        if not self._peers.know(self._claim):
            raise NotHeard
        self._spare += max(lack, -(-room // self._peers.servers))
        self._claim = self._peers.claimed()

    def use(self, units: int) -> None:
        """Counts units, whether there is room for them or not."""
        everything, own = self.drained()
        self._all, self._own = take(everything, units), take(own, units)
        self._used += units
        self._spare -= min(self._spare, units)
        self._idle = False

    def learn(self, before: Told | None, told: Told) -> None:
        """What another server has used."""
        everything, _ = self.drained()
        new = told.recent if before is None else min(told.recent, told.used - before.used)
        self._all = take(everything, max(0, min(new, everything.limit)))

    def give_back(self) -> None:
        """Gives up spare units if none was used since the last call."""
        if self._idle:
            self._spare = 0
        self._idle = True

    @property
    def told(self) -> Told | None:
        """What the others have to know; None if nothing is left of it."""
        everything, own = self.drained()
        if not self._spare and not everything.used and not own.used:
            return None
        return Told(self._used, self._spare, -(-own.used // own.per_unit))


class SharedCount:
    """A limit of one key on what is open at once. name: under which servers speak of it."""

    def __init__(self, name: str, limit: int, peers: Peers, count: int):
        """count: what is open already."""
        self.name, self.most, self.open, self._peers = name, limit, count, peers
        self._spare = self._claim = 0
        self._idle = True

    @property
    def share(self) -> int:
        """The fixed share."""
        return max(1, self.most // self._peers.servers)

    def take(self, *, alone: bool = False) -> None:
        """Counts one more. Raises LimitExceeded, NotHeard."""
        if alone or not self._peers.complete:
            if self.open >= self.share:
                raise self._refusal(self.open)
        elif not self._spare:
            held = sum(told.used + told.spare for told in self._peers.of_others(self.name))
            if (room := self.most - self.open - held) < 1:
                raise self._refusal(self.open + held)
            if not self._peers.know(self._claim):
                raise NotHeard
            self._spare = -(-room // self._peers.servers)
            self._claim = self._peers.claimed()
        self._spare -= min(1, self._spare)
        self.open += 1
        self._idle = False

    def _refusal(self, count: int) -> LimitExceeded:
        return LimitExceeded(f"{count} requests of this key are open", f"at most {self.most} at once", 1.0)

    def release(self) -> None:
        self.open -= 1

    def give_back(self) -> None:
        """Gives up spare places if none was taken since the last call."""
        if self._idle:
            self._spare = 0
        self._idle = True

    @property
    def told(self) -> Told | None:
        """As that of a rate; used: what is open."""
        return Told(self.open, self._spare, 0) if self.open or self._spare else None
