"""Limits per key: exact at their borders, true in what they tell, and blind to clocks that jump."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import LimitExceeded
from kvasir.serve.auth.buckets import MINUTE, SECOND, Bucket, drain, take, wait
from kvasir.serve.auth.keys import Key, KeyLimits
from kvasir.serve.auth.quota import Account
from kvasir.serve.settings import ServeSettings
from tests.serve.running import client, make_front


class Clock:
    """Nanoseconds that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 10**18

    def __call__(self) -> int:
        return self.now


def key(secret: str = "first-key", name: str = "ann", **limits) -> Key:
    return Key(secret, name, limits=KeyLimits(**limits))


# -- the bucket --------------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.integers(0, 2 * MINUTE), st.integers(1, 40)), max_size=40)


@given(st.integers(1, 30), STEPS)
def test_the_bucket_is_exact_at_its_border(limit, steps):
    bucket, now, taken = Bucket(limit), 0, []
    for passed, units in steps:
        now += passed
        bucket = drain(bucket, now)
        assert wait(bucket, bucket.room) == 0 and wait(bucket, bucket.room + 1) != 0
        delay = wait(bucket, units)
        if delay is None:
            assert units > limit
        elif delay:
            assert wait(drain(bucket, now + delay - 1), units), "too early by a nanosecond"
            assert wait(drain(bucket, now + delay), units) == 0, "the reported delay is enough"
        else:
            bucket = take(bucket, units)
            taken.append((now, units))
    for i, (start, _) in enumerate(taken):
        for j in range(i, len(taken)):
            total = sum(units for _, units in taken[i : j + 1])
            assert total <= limit + (taken[j][0] - start) * limit / MINUTE, "more than the limit in some stretch"


@given(st.integers(1, 10**9), st.lists(st.integers(-(10**15), 10**15), max_size=10))
def test_a_backward_clock_jump_refills_no_tokens(limit, jumps):
    full = take(Bucket(limit, at=10**18), limit)
    bucket, now = full, 10**18
    for jump in jumps:
        now += jump
        bucket = drain(bucket, now)
        assert 0 <= bucket.used <= full.used
    assert wait(drain(bucket, bucket.at + full.used), limit) == 0, "a minute later all is well"


def test_an_overdrawn_limit_must_refill_first():
    bucket = take(Bucket(60), 180)
    assert bucket.room == 0
    assert wait(bucket, 1) == 121 * SECOND


# -- an account --------------------------------------------------------------------------------------------


def refused(account: Account) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as caught:
        account.open()
    return caught.value


def test_requests_per_minute():
    clock = Clock()
    account = Account(key(requests_per_minute=6), clock)
    for _ in range(6):
        account.open()
        account.close()
    assert refused(account).retry_after == 10.0
    assert refused(account).retry_after == 10.0, "asking in vain costs nothing"
    clock.now += 10 * SECOND - 1
    refused(account)
    clock.now += 1
    account.open()
    refused(account)


def test_requests_of_a_key_beyond_its_concurrent_limit_are_refused():
    account = Account(key(concurrent=2), Clock())
    account.open()
    account.open()
    assert refused(account).retry_after
    account.close()
    account.open()


def test_tokens_of_prompts_and_answers():
    clock = Clock()
    account = Account(key(tokens_per_minute=100), clock)
    account.prompt(60)
    account.answer(60)  # never cut off
    with pytest.raises(LimitExceeded) as caught:
        account.prompt(1)
    assert caught.value.retry_after == pytest.approx(12.6)
    clock.now += int(12.6 * SECOND)
    account.prompt(1)
    with pytest.raises(LimitExceeded) as caught:
        account.prompt(101)
    assert caught.value.retry_after is None, "no waiting helps"


# -- over HTTP ---------------------------------------------------------------------------------------------

BODY = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def bearer(secret: str = "first-key") -> dict:
    return {"Authorization": f"Bearer {secret}"}


async def ask(http, secret: str = "first-key", **fields):
    return await http.post("/v1/completions", json=BODY | fields, headers=bearer(secret))


def limited(monkeypatch, *keys: Key, clock: Clock | None = None, **runner):
    """A client of an application whose limits have a separate clock."""
    import tests.serve.running as running
    from kvasir.serve.hosting.catalogue import OneModel

    if clock is not None:
        monkeypatch.setattr(running, "OneModel", lambda front, settings: OneModel(front, settings, clock))
    return client(ServeSettings(keys=keys), **runner)


async def test_too_many_requests_get_429_and_a_true_retry_after(monkeypatch):
    clock = Clock()
    other = key("second-key", "bob")
    async with limited(monkeypatch, key(requests_per_minute=2), other, clock=clock) as http:
        for left in ("1", "0"):
            response = await ask(http)
            assert response.status_code == 200
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == left
        assert response.headers["x-ratelimit-reset-requests"] == "60s"
        assert "x-ratelimit-limit-tokens" not in response.headers
        response = await ask(http)
        assert response.status_code == 429 and response.headers["retry-after"] == "30"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert (await http.get("/v1/models", headers=bearer())).status_code == 200, "looking costs nothing"
        assert (await ask(http, "second-key")).status_code == 200, "nobody else pays"
        clock.now += 30 * SECOND - 1
        assert (await ask(http)).status_code == 429
        clock.now += 1
        assert (await ask(http)).status_code == 200
        clock.now -= 3600 * SECOND
        assert (await ask(http)).headers["retry-after"] == "30"


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_counted_when_they_are_generated(monkeypatch, stream):
    clock = Clock()
    async with limited(monkeypatch, key(tokens_per_minute=10), clock=clock) as http:
        first = await ask(http, stream=stream)  # 3 prompt tokens and 4 generated ones
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-tokens"] == "10"
        left = await ask(http, prompt="abcd")
        assert left.status_code == 429 and left.headers["retry-after"] == "6"
        assert left.headers["x-ratelimit-remaining-tokens"] == "3"
        assert (await ask(http)).status_code == 200
        never = await ask(http, prompt="a" * 11)
        assert never.status_code == 429 and "retry-after" not in never.headers
        assert never.headers["x-should-retry"] == "false"


async def test_embeddings_and_lists_of_prompts_are_counted(monkeypatch):
    async with limited(monkeypatch, key(tokens_per_minute=1000), clock=Clock()) as http:
        both = await ask(http, prompt=["abc", "de"], n=2)
        assert both.headers["x-ratelimit-remaining-tokens"] == str(1000 - 5 - 2 * 2 * 4)
        response = await http.post("/v1/embeddings", json={"input": ["abc", "d"]}, headers=bearer())
        assert response.headers["x-ratelimit-remaining-tokens"] == str(1000 - 5 - 2 * 2 * 4 - 4)


async def test_a_concurrency_of_one_serves_one_request_at_a_time(monkeypatch):
    front = make_front()
    async with limited(monkeypatch, key(concurrent=1), front=front) as http:
        held = asyncio.Event()
        submit = front.engine.submit

        async def slow(request):
            await held.wait()
            async for delta in submit(request):
                yield delta

        front.engine.submit = slow  # type: ignore[method-assign]
        first = asyncio.ensure_future(ask(http, stream=True))
        await asyncio.sleep(0.05)
        refused = await ask(http)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        held.set()
        assert (await first).status_code == 200
        assert (await ask(http)).status_code == 200
        assert (await ask(http, top_p=5)).status_code == 400
        assert (await ask(http)).status_code == 200, "a refused one gives its place back"


def test_limits_use_a_monotonic_clock_only():
    folder = Path(__file__).resolve().parents[3] / "src" / "kvasir"
    for name in ("serve/auth/quota.py", "sched/slo.py", "sched/budget.py", "sched/fairness.py"):
        assert "time.time(" not in (folder / name).read_text()
