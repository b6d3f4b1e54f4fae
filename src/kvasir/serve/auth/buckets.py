"""Leaky buckets in whole nanoseconds: a limit of n per minute admits n at once, and drains in a minute. A clock that
runs backwards counts as standing still."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvasir.errors import LimitExceeded

SECOND = 1_000_000_000
MINUTE = 60 * SECOND


@dataclass(frozen=True, slots=True)
class Bucket:
    """limit: units per minute. used: nanoseconds until it is empty; exceeds that of a full bucket when units were taken
    that could not be foreseen. at: time of `used`, on the clock."""

    limit: int
    used: int = 0
    at: int = 0

    @property
    def per_unit(self) -> int:
        """Nanoseconds that a unit takes to drain, rounded up, so that at most `limit` units drain in a minute."""
        return -(-MINUTE // self.limit)

    @property
    def room(self) -> int:
        """Units that may be taken at the time `at`."""
        return max(0, self.limit - -(-self.used // self.per_unit))


def drain(bucket: Bucket, now: int) -> Bucket:
    """The bucket as of `now`."""
    passed = max(0, now - bucket.at)
    return replace(bucket, used=max(0, bucket.used - passed), at=now)


def wait(bucket: Bucket, units: int) -> int | None:
    """Nanoseconds from `at` until `units` may be taken; 0: at once; None: never, they exceed the limit."""
    if units > bucket.limit:
        return None
    return max(0, bucket.used - (bucket.limit - units) * bucket.per_unit)


def take(bucket: Bucket, units: int) -> Bucket:
    """The bucket after taking `units`, whether there was room for them or not."""
    return replace(bucket, used=bucket.used + units * bucket.per_unit)


def taken(bucket: Bucket, units: int, now: int, what: str) -> Bucket:
    """The bucket after taking units. Raises LimitExceeded if there is no room for them. what: the units' name."""
    bucket = drain(bucket, now)
    if (delay := wait(bucket, units)) != 0:
        raise refusal(bucket, units, delay, what)
    return take(bucket, units)


def refusal(bucket: Bucket, units: int, delay: int | None, what: str) -> LimitExceeded:
    """The error for units that a bucket has no room for until `delay` nanoseconds from now; None: never."""
    if delay is None:
        return LimitExceeded(f"{units} {what} are more than this key may use in one request", f"{bucket.limit} at most")
    return LimitExceeded(
        f"this key may use {bucket.limit} {what} per minute", f"try again in {duration(delay)}", delay / SECOND
    )


def duration(nanoseconds: int) -> str:
    """Milliseconds or seconds, rounded up, in the format of the OpenAI API."""
    milliseconds = -(-nanoseconds // 1_000_000)
    return f"{milliseconds}ms" if milliseconds < 1000 else f"{-(-milliseconds // 1000)}s"
