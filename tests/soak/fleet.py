"""What is done to the replicas of a fleet on purpose, besides what is done to any engine (harm.py)."""

from __future__ import annotations

import httpx

from tests.soak.client import Client
from tests.soak.server import MANAGER


async def kill_all(c: Client) -> bool:
    """All replicas are gone from one moment to the next."""
    killed = [await c.server.kill_engine(pid) for pid in c.server.engines]
    return sum(killed) > 1


async def replace(c: Client) -> bool:
    """A replica is replaced, with more or less time for its streams."""
    index = c.rng.randrange(c.server.replicas)
    return await _operate(c, f"/fleet/replicas/{index}/restart", {"grace": _grace(c)})


async def replace_all(c: Client) -> bool:
    """A rolling restart."""
    return await _operate(c, "/fleet/restart", {"grace": _grace(c)})


async def scale(c: Client) -> bool:
    """Replicas go, and come, up to one more than there are at rest."""
    return await _operate(c, "/fleet/scale", {"replicas": c.rng.randint(1, c.server.most), "grace": _grace(c)})


def _grace(c: Client) -> float:
    return c.rng.choice((0.0, 0.2, 5.0))


async def _operate(c: Client, route: str, body: dict) -> bool:
    """False where a replica died while it started, or is not there at present."""
    kills = c.server.kills
    headers = {"authorization": f"Bearer {MANAGER}"}
    response: httpx.Response = await c.http.post(
        c.server.base + route, json=body, headers=headers, timeout=c.tally.patience
    )
    if response.status_code == 200:
        return True
    gone = response.status_code == 400 and "there is no replica" in response.text
    died = response.status_code == 503 and c.server.kills > kills
    assert gone or died, f"{route}: {response.status_code}: {response.text[:300]}"
    return False


# A harm and how often it is done, in relation to the others.
FLEET_HARMS = {
    "all replicas killed": (kill_all, 0.2),
    "replica replaced": (replace, 0.5),
    "all replicas replaced": (replace_all, 0.2),
    "fleet scaled": (scale, 0.5),
}
