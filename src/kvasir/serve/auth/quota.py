"""Limits per key: requests and tokens per minute, and concurrent requests. Requests beyond a limit get 429 with
Retry-After. Rates are leaky buckets (buckets.py); the clock is a parameter."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir.errors import LimitExceeded
from kvasir.serve.auth.buckets import SECOND, Bucket, drain, duration, take, taken
from kvasir.serve.auth.keys import Key, KeyLimits
from kvasir.serve.http.asgi import refuse
from kvasir.serve.http.dialect import dialect_of
from kvasir.serve.http.faults import fault_of
from kvasir.serve.http.held import Held

_ENDS = re.compile(r"/v1/(responses|batches|messages/batches)/[^/]+/cancel")  # routes that end work are never refused


class Account:
    """One key's buckets, its open requests, and the running lines of its batches. num_open, num_lines: how many of
    these there are."""

    def __init__(self, key: Key, clock: Callable[[], int]):
        self._clock = clock
        self.num_open = self.num_lines = 0
        self._freed = asyncio.Event()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.limit(key.limits)

    def limit(self, limits: KeyLimits) -> None:
        """Applies new limits; the buckets keep their used fraction."""
        now = self._clock()
        self._limits = limits
        self._freed.set()
        self._requests = _bucket(limits.requests_per_minute, now, self._requests)
        self._tokens = _bucket(limits.tokens_per_minute, now, self._tokens)

    def open(self) -> OpenRequest:
        """Counts a request, which stays open until its holders have left. Raises LimitExceeded; refused requests cost
        nothing."""
        most = self._limits.concurrent
        if most is not None and self.num_open >= most:
            raise LimitExceeded(f"{self.num_open} requests of this key are open", f"at most {most} at once", 1.0)
        if self._requests is not None:
            self._requests = taken(self._requests, 1, self._clock(), "requests")
        self.num_open += 1
        return OpenRequest(self)

    def close(self) -> None:
        self.num_open -= 1
        self._freed.set()

    @asynccontextmanager
    async def line(self) -> AsyncIterator[None]:
        """A running line of a batch, once there is room for it in addition to requests and other lines. Requests never
        wait for lines, so a running batch does not lock its key out."""
        while (most := self._limits.concurrent) is not None and self.num_open + self.num_lines >= most:
            self._freed.clear()
            await self._freed.wait()
        self.num_lines += 1
        try:
            yield
        finally:
            self.num_lines -= 1
            self._freed.set()

    def prompt(self, tokens: int) -> None:
        """Counts a prompt's tokens before they are computed. Raises LimitExceeded if there is no room for them, also
        while earlier choices have overdrawn the bucket."""
        if self._tokens is not None:
            self._tokens = taken(self._tokens, tokens, self._clock(), "tokens")

    def answer(self, tokens: int) -> None:
        """Counts generated tokens as they come. A running request is never cut off; the next one has to wait
        instead."""
        if self._tokens is not None:
            self._tokens = take(drain(self._tokens, self._clock()), tokens)

    @property
    def is_limited(self) -> bool:
        limits = self._limits
        return any((limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent))

    @property
    def buckets(self) -> tuple[Bucket | None, Bucket | None]:
        """Of requests and of tokens."""
        return self._requests, self._tokens

    def mirror(self, buckets: tuple[Bucket | None, Bucket | None]) -> None:
        """Takes over the buckets of the account that counts for this one, in another process of this machine."""
        self._requests, self._tokens = buckets

    def headers(self, anthropic: bool = False) -> list[tuple[bytes, bytes]]:
        """Response headers with the limits and what remains of them, under the names of the OpenAI API or of
        Anthropic's."""
        found: dict[str, object] = {}
        for name, bucket in zip(("requests", "tokens"), self.buckets, strict=True):
            if bucket is None:
                continue
            now = drain(bucket, self._clock())
            reset = _moment(now.used) if anthropic else duration(now.used)
            for what, value in (("limit", now.limit), ("remaining", now.room), ("reset", reset)):
                found[f"anthropic-ratelimit-{name}-{what}" if anthropic else f"x-ratelimit-{what}-{name}"] = value
        return [(name.encode(), str(value).encode()) for name, value in found.items()]


class OpenRequest(Held):
    """One of a key's open requests."""

    def __init__(self, account: Account):
        self._account = account

    def _release(self) -> None:
        self._account.close()


def _bucket(limit: int | None, now: int, before: Bucket | None) -> Bucket | None:
    if limit is None:
        return None
    return replace(before, limit=limit) if before else Bucket(limit, at=now)


def _moment(nanoseconds: int) -> str:
    """The time that is `nanoseconds` from now, in RFC 3339, as in the Anthropic API."""
    then = datetime.now(UTC) + timedelta(seconds=math.ceil(nanoseconds / SECOND))
    return then.strftime("%Y-%m-%dT%H:%M:%SZ")


class Quotas:
    """The accounts of all keys, by name. One per application, on its event loop."""

    def __init__(self, keys: Sequence[Key], clock: Callable[[], int] = time.monotonic_ns, servers: int = 1):
        """servers: that divide the limits among them."""
        self._clock = clock
        self._servers = servers
        self.accounts: Mapping[str, Account] = {}
        self.take(keys)

    def take(self, keys: Sequence[Key]) -> None:
        """Replaces the keys. The account of a name that remains continues."""
        before = self.accounts
        keys = [replace(key, limits=key.limits.divided(self._servers)) for key in keys]
        self.accounts = {key.name: before.get(key.name) or self._account(key) for key in keys}
        for key in keys:
            self.accounts[key.name].limit(key.limits)

    def _account(self, key: Key) -> Account:
        return Account(key, self._clock)

    async def open(self, tenant: str) -> Held:
        """As `Account.open`, of a tenant that has an account."""
        return self.accounts[tenant].open()

    async def prompt(self, tenant: str, tokens: int) -> None:
        if account := self.accounts.get(tenant):
            account.prompt(tokens)

    def line(self, tenant: str) -> AbstractAsyncContextManager[object]:
        """As `Account.line`; does not wait if the tenant has no account."""
        account = self.accounts.get(tenant)
        return account.line() if account else nullcontext()

    def answer(self, tenant: str, tokens: int) -> None:
        if account := self.accounts.get(tenant):
            account.answer(tokens)


class QuotaGuard:
    """429 for a POST of a key that is at its limit, before its body is read. Reports the limits to every key in
    headers."""

    def __init__(self, app: ASGIApp, quotas: Quotas):
        self.app = app
        self.quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key: Key | None = scope.get("state", {}).get("key")
        if scope["type"] != "http" or scope["method"] != "POST" or key is None or _ENDS.fullmatch(scope["path"]):
            return await self.app(scope, receive, send)
        account = self.quotas.accounts[key.name]

        async def reporting(message: Message) -> None:
            if message["type"] == "http.response.start":
                anthropic = dialect_of(scope).limit_headers == "anthropic"
                message["headers"] = [*message.get("headers", ()), *account.headers(anthropic)]
            await send(message)

        try:
            place = await self.quotas.open(key.name)
        except LimitExceeded as error:
            return await refuse(fault_of(error), scope, receive, reporting)
        scope["state"]["place"] = place
        try:
            await self.app(scope, receive, reporting)
        finally:
            place.leave()


def hold_place(scope: Scope, work: asyncio.Task) -> None:
    """Keeps the request's place until `work`, which it started in the background, has ended too."""
    place: Held | None = scope["state"].get("place")
    if place is not None:
        place.hold(work)
