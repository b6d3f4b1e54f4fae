"""Replicas in network namespaces of their own, whose links go down without a word: no packet arrives, and no end of a
connection is told.

A user namespace makes this possible without privileges. `in_namespace` runs this file again in one; there, each
`kvasir replica` has a pair of virtual interfaces with the server's side.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.fleet.links import LOST, REPLICAS, There, broken, secrets_in, served
from tests.signals import heed
from tests.soak.client import Tally

SILENT = 25.0  # seconds: longer than a silent host counts as alive
ENTER = ("unshare", "--user", "--map-root-user", "--net")


def missing() -> str:
    """Why this machine cannot do it; "" if it can."""
    for tool in ("unshare", "nsenter", "ip"):
        if not shutil.which(tool):
            return f"no {tool}"
    probe = "ip link set lo up && ip link add probe0 type veth peer name probe1"
    done = subprocess.run([*ENTER, "sh", "-c", probe], capture_output=True, text=True)
    return done.stderr.strip()[:200] if done.returncode else ""


def in_namespace(seconds: float, seed: int) -> Tally:
    """Runs this file in namespaces of its own."""
    with tempfile.TemporaryDirectory(prefix="chaos-net-", dir="/tmp") as folder:
        out = Path(folder) / "tally.json"
        command = [*ENTER, sys.executable, "-m", "tests.fleet.namespaces", str(seconds), str(seed), str(out)]
        done = subprocess.run(command)
        tally = Tally()
        if not out.exists():
            tally.wrong.append(f"namespaces: the run ended with status {done.returncode}")
            return tally
        found = msgspec.json.decode(out.read_bytes())
        for name in ("injected", "fired", "survived"):
            getattr(tally, name).update(found[name])
        tally.longest |= found["longest"]
        tally.wrong += found["wrong"]
        return tally


class Apart(There):
    """A replica in a namespace of its own, at 10.77.<number>.2."""

    def __init__(self, folder: Path, secret: tuple[str, ...], number: int):
        self.address = f"10.77.{number}.2"
        super().__init__(folder, (*secret, "--host", self.address))
        self.number = number
        self.port = 9100
        # The namespace lives as long as this process.
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._wait_for_namespace()
        near, far, pid = f"near{number}", f"far{number}", str(self._holder.pid)
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        run("ip", "link", "set", far, "netns", pid)
        run("ip", "addr", "add", f"10.77.{number}.1/30", "dev", near)
        run("ip", "link", "set", near, "up")
        self.inside("ip", "addr", "add", f"{self.address}/30", "dev", far)
        self.inside("ip", "link", "set", "lo", "up")
        self.up()
        self.command = ("nsenter", "--target", pid, "--net", *self.command)

    def _wait_for_namespace(self) -> None:
        own = os.readlink("/proc/self/ns/net")
        for _ in range(1000):
            if os.readlink(f"/proc/{self._holder.pid}/ns/net") != own:
                return
            time.sleep(0.01)
        raise AssertionError("no namespace")

    def inside(self, *command: str) -> None:
        run("nsenter", "--target", str(self._holder.pid), "--net", *command)

    def up(self) -> None:
        self.inside("ip", "link", "set", f"far{self.number}", "up")

    def down(self) -> None:
        """From now on nothing arrives."""
        self.inside("ip", "link", "set", f"far{self.number}", "down")

    def end(self) -> None:
        try:
            super().end()
        finally:
            self._holder.kill()
            self._holder.wait()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


async def break_networks(seconds: float, seed: int) -> Tally:
    """Links go down and come back for so long; once for longer than a silent host counts as alive."""
    rng, tally = random.Random(seed), Tally(LOST)
    with tempfile.TemporaryDirectory(prefix="kvasir-net-", dir="/tmp") as name:
        key, cert, secret = secrets_in(Path(name), ",".join(f"IP:10.77.{i}.2" for i in range(REPLICAS)))
        async with AsyncExitStack() as stack:
            there = []
            for i in range(REPLICAS):
                there.append(one := Apart(Path(name), secret, i))
                await asyncio.to_thread(one.start)
                stack.callback(one.end)
            base, pid = await stack.enter_async_context(served([f"{o.address}:{o.port}" for o in there], key, cert))
            harms = {
                "link down": (lambda: fall(base, rng.choice(there), rng.uniform(0.2, 6.0)), True),
                "link down until the host counts as dead": (lambda: fall(base, rng.choice(there), SILENT), False),
            }
            await broken(base, pid, tally, rng, harms, seconds)
    return tally


async def fall(base: str, one: Apart, seconds: float) -> bool:
    """A link goes down and comes back; whether the replica had requests, or got none meanwhile."""
    async with httpx.AsyncClient() as http:
        before = (await http.get(f"{base}/fleet", timeout=60)).json()["replicas"][one.number]
        await asyncio.to_thread(one.down)
        await asyncio.sleep(seconds)
        after = (await http.get(f"{base}/fleet", timeout=60)).json()["replicas"][one.number]
        await asyncio.to_thread(one.up)
    return bool(before["open"]) or after["status"] != "ready"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    heed()
    run("ip", "link", "set", "lo", "up")
    tally = asyncio.run(break_networks(given.seconds, given.seed))
    names = ("injected", "fired", "survived", "longest", "wrong")
    wire: dict[str, Any] = {name: getattr(tally, name) for name in names}
    given.out.write_bytes(msgspec.json.encode(wire))
    return 0


if __name__ == "__main__":
    sys.exit(main())
