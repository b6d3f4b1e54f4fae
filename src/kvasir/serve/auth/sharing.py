"""The limits of keys of several servers in front of the same replicas (shares.py): their accounts, and the exchange of
what they have used, over the connections to the replicas' hosts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import msgspec

from kvasir.engine.client import Engine, Exchanges
from kvasir.errors import LimitExceeded
from kvasir.serve.auth.buckets import Bucket
from kvasir.serve.auth.keys import Key, KeyLimits
from kvasir.serve.auth.quota import Account, OpenRequest, Quotas
from kvasir.serve.auth.shares import News, NotHeard, Peers, SharedCount, SharedRate, Told
from kvasir.serve.http.held import Held

T = TypeVar("T")
log = logging.getLogger("kvasir.serve")

TELL_SECONDS = 0.5  # between two messages when nothing is urgent
GAP_SECONDS = 0.02  # between two at least
PATIENCE = 0.5  # seconds that a request waits for the others to hear of a claim

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(News).decode


class SharedAccount(Account):
    """Of a key whose limits several servers share. Running lines of batches keep to the fixed share."""

    def __init__(self, key: Key, peers: Peers):
        self._peers, self._name = peers, key.name
        self._rates: dict[str, SharedRate] = {}
        self._count: SharedCount | None = None
        super().__init__(key, peers.clock)

    def limit(self, limits: KeyLimits) -> None:
        self._limits = limits
        for what, most in (("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute)):
            if most is None:
                self._rates.pop(what, None)
            elif known := self._rates.get(what):
                known.limit(most)
            else:
                self._rates[what] = SharedRate(f"{self._name}/{what}", what, most, self._peers)
        if limits.concurrent is None:
            self._count = None
        elif self._count is None:
            self._count = SharedCount(f"{self._name}/open", limits.concurrent, self._peers, self.num_open)
        else:
            self._count.most = limits.concurrent
        self._freed.set()

    @property
    def shared(self) -> Mapping[str, SharedRate | SharedCount]:
        """Its limits, by the names under which servers speak of them."""
        found = [*self._rates.values(), *((self._count,) if self._count else ())]
        return {one.name: one for one in found}

    def open(self, alone: bool = False) -> OpenRequest:
        """alone: within the fixed share. Raises NotHeard, too."""
        if count := self._count:
            count.take(alone=alone)
        try:
            if rate := self._rates.get("requests"):
                rate.take(1, alone=alone)
        except (LimitExceeded, NotHeard):
            if count:
                count.release()
            raise
        self.num_open += 1
        return OpenRequest(self)

    def close(self) -> None:
        super().close()
        if self._count:
            self._count.release()

    @asynccontextmanager
    async def line(self) -> AsyncIterator[None]:
        while (count := self._count) is not None and self.num_open + self.num_lines >= count.share:
            self._freed.clear()
            await self._freed.wait()
        self.num_lines += 1
        try:
            yield
        finally:
            self.num_lines -= 1
            self._freed.set()

    def prompt(self, tokens: int, alone: bool = False) -> None:
        """alone: within the fixed share. Raises NotHeard, too."""
        if rate := self._rates.get("tokens"):
            rate.take(tokens, alone=alone)

    def answer(self, tokens: int) -> None:
        if rate := self._rates.get("tokens"):
            rate.use(tokens)

    @property
    def buckets(self) -> tuple[Bucket | None, Bucket | None]:
        requests, tokens = self._rates.get("requests"), self._rates.get("tokens")
        return requests and requests.effective, tokens and tokens.effective


class SharingQuotas(Quotas):
    """The accounts of a server that shares limits with others."""

    accounts: Mapping[str, SharedAccount]

    def __init__(self, keys: Sequence[Key], servers: int, clock: Callable[[], int] = time.monotonic_ns):
        """servers: how many there are, this one included."""
        self._changed = asyncio.Event()
        self._heard = asyncio.Event()
        self.peers = Peers(secrets.token_hex(8), servers, clock, self._changed.set)
        super().__init__(keys, clock)

    def _account(self, key: Key) -> SharedAccount:
        return SharedAccount(key, self.peers)

    async def open(self, tenant: str) -> Held:
        return await self._patiently(self.accounts[tenant].open)

    async def prompt(self, tenant: str, tokens: int) -> None:
        if account := self.accounts.get(tenant):
            await self._patiently(lambda alone: account.prompt(tokens, alone))

    async def _patiently(self, attempt: Callable[[bool], T]) -> T:
        """The result of attempt(alone), as `SharedAccount.open`. Waits a moment for the others to hear of a claim; then
        the fixed share counts."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while True:
            heard = self._heard
            try:
                return attempt(False)
            except NotHeard:
                if (left := deadline - loop.time()) <= 0:
                    return attempt(True)
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await heard.wait()

    # -- the exchange ------------------------------------------------------------------------------------------

    async def share(self, engines: Callable[[], Iterable[Engine]]) -> None:
        """Exchanges with the other servers as long as it runs. engines: over which it reaches them."""
        loop = asyncio.get_running_loop()
        returned = loop.time()
        while True:
            if loop.time() - returned >= TELL_SECONDS:
                returned = loop.time()
                for account in self.accounts.values():
                    for limit in account.shared.values():
                        limit.give_back()
            data = _encode(self.peers.news(self._told()))
            for engine in engines():
                if isinstance(engine, Exchanges):
                    engine.exchange(data, self.receive)
            await asyncio.sleep(GAP_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(TELL_SECONDS):
                    await self._changed.wait()
            self._changed.clear()

    def _told(self) -> dict[str, Told]:
        shared = (item for account in self.accounts.values() for item in account.shared.items())
        return {name: told for name, limit in shared if (told := limit.told)}

    def receive(self, data: bytes) -> None:
        """Learns what another server says. What cannot be read is dropped."""
        try:
            news = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return log.debug("a server in front of the same replicas speaks another version")
        if (said := self.peers.take(news)) is None:
            return
        limits = {name: limit for account in self.accounts.values() for name, limit in account.shared.items()}
        for name, (before, told) in said.items():
            if isinstance(limit := limits.get(name), SharedRate):
                limit.learn(before, told)
        heard, self._heard = self._heard, asyncio.Event()
        heard.set()
