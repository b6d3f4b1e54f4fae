"""One client among many: it asks, reads, and compares with the plain run."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.soak.server import BATCH, FREE, LIMITED, Server
from tests.soak.work import ErrorEvent, Question, streamed, varied, whole

CLASSES = {FREE: ("interactive", "batch", "background"), BATCH: ("batch", "background"), LIMITED: ("interactive",)}


@dataclass
class Tally:
    """What happened, by name. fired: of what was injected, that of which the effect was seen. longest: the most seconds
    that one took. seen: the most that a counter of the engine showed at a moment of rest. wrong: a line for each thing
    that must not happen. patience: seconds after which a piece of load or harm counts as lost, however many signs of
    life its stream gives. slowness: how many times longer things take than on a machine that does nothing else.
    replicas: of the server; 1 for a single engine."""

    patience: float = 300.0
    slowness: float = 1.0
    replicas: int = 1
    injected: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    survived: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def count(self, name: str, work: Awaitable[bool], patience: float | None = None) -> None:
        """Runs one piece of load or harm, which says whether it had its effect; what it raises is lost or wrong."""
        self.injected[name] += 1
        begun = time.monotonic()
        try:
            async with asyncio.timeout(patience or self.patience) as limit:
                fired = await work
            self.longest[name] = max(self.longest.get(name, 0.0), time.monotonic() - begun)
            self.fired[name] += fired
            self.survived[name] += 1
        except TimeoutError as error:
            end = "lost: no end within its limit" if limit.expired() else f"TimeoutError: {error}"
            self.wrong.append(f"{name}: {end}")
        except Exception as error:
            self.wrong.append(f"{name}: {type(error).__name__}: {error}"[:2000])


class Refused(Exception):
    """A clear error instead of an answer: its status, its code, its headers."""

    def __init__(self, status: int, code: str, headers: httpx.Headers | None = None):
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code
        self.headers = headers or httpx.Headers()


@dataclass
class Client:
    """plain: the questions, each with its answer when it was asked alone."""

    server: Server
    http: httpx.AsyncClient
    rng: random.Random
    tally: Tally
    plain: list[tuple[Question, Any]]

    async def post(self, route: str, body: Any, key: str = FREE) -> Any:
        """The comparable part of an answer. Raises Refused."""
        headers = {"authorization": f"Bearer {key}"}
        request = self.http.build_request(
            "POST", self.server.base + route, json=body, headers=headers, timeout=self.tally.patience
        )
        response = await self.http.send(request, stream=True)
        try:
            if response.status_code == 200 and body.get("stream"):
                return await streamed(response.aiter_lines())
            await response.aread()
            if response.status_code == 200:
                return whole(response.json())
            raise Refused(response.status_code, response.json()["error"]["code"], response.headers)
        except ErrorEvent as error:
            raise Refused(200, str(error)) from None
        finally:
            await response.aclose()

    async def answer(self) -> bool:
        """Some question in some manner; the answer must be that of its plain run, or honestly refused."""
        question, expected = self.rng.choice(self.plain)
        key = self.rng.choice((FREE, FREE, BATCH, LIMITED))
        body = varied(self.rng, question) | {"service_class": self.rng.choice(CLASSES[key])}
        kills = self.server.kills
        try:
            found = await self.post(question.route, body, key)
        except Refused as error:
            if not (error.code == "rate_limit_exceeded" and key == LIMITED and "retry-after" in error.headers):
                self.excuse(error, kills)
            self.tally.survived[f"of these, refused: {error.code}"] += 1
            return False
        assert found == expected, f"{question.route} {body}\n  answered {found}\n  plain    {expected}"
        self.tally.survived["of these, equal to the plain run"] += 1
        return True

    def excuse(self, error: Refused, kills: int) -> None:
        """Raises the error unless any request may get it: the queue is full, or two engines died with the request.
        kills: the number of kills when it was sent."""
        if error.status == 429 and error.code == "queue_full":
            assert "retry-after" in error.headers, "429 without Retry-After"
        elif error.code != "engine_unavailable" or self.server.kills < kills + 2:
            raise AssertionError(f"{error}, with {self.server.kills - kills} kills meanwhile")

    async def refused(self, body: Any, *expected: int | str, route: str = "/v1/completions", key: str = FREE) -> bool:
        """The server must say no, with one of these statuses or codes; False when it had another good reason."""
        kills = self.server.kills
        try:
            found = await self.post(route, body, key)
        except Refused as error:
            fired = error.status in expected or error.code in expected
            if not fired:
                self.excuse(error, kills)
            return fired
        raise AssertionError(f"{route} {str(body)[:200]} was answered: {str(found)[:200]}")


async def repeat(work: Callable[[], Awaitable[Any]], goes_on: Callable[[], bool], pause: Callable[[], float]) -> None:
    """Repeats requests until the load ends, which is checked every second."""
    while goes_on():
        await work()
        left = pause()
        while left > 0 and goes_on():
            await asyncio.sleep(min(left, 1.0))
            left -= 1.0
