"""Fleets on a real Ray, for tests."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from tests.cli.running import ROOT, environment
from tests.fleet.test_serve import ready

CLUSTER = """
import sys
from kvasir.environment import prepare_ray
prepare_ray()
import ray
for last in (False, False, True):
    try:
        context = ray.init(address="local", num_cpus=4, resources={"server": 1}, include_dashboard=False)
        break
    except Exception:  # a busy machine; see RayCluster
        ray.shutdown()
        if last:
            raise
print("cluster at", context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
# One token for all, so that Ray writes none into the home folder.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
SMALL = {"model": "kvasir-mini", "max_model_len": 512, "num_blocks": 64, "overlap": False, "resources": {"cpus": 0.5}}


def container_command() -> list[str]:
    """The command of the container file, as a list of words."""
    text = (ROOT / "deploy" / "Containerfile").read_text()
    [command] = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    return json.loads(command)


def free_port() -> int:
    """A free port below the range from which the system assigns ports: Ray takes many of those."""
    while True:
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", random.randrange(20000, 30000)))
            return s.getsockname()[1]


@contextmanager
def fleet(folder: Path, config: dict, *more: str):
    """The server of a fleet: its address and process. It must end by SIGTERM, and all actors of its own Ray with it."""
    port = free_port()
    config = {**config, "server": {"port": port, "drain": 1, **config.get("server", {})}}
    (folder / "fleet.yaml").write_text(json.dumps(config))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [*container_command(), *more]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment(PATH=path, **TOKEN), stdout=log, stderr=log)
    base = f"http://127.0.0.1:{port}"
    try:
        healthy(base, process, folder / "log")
        yield base, process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait() in (0, -signal.SIGTERM), (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


def healthy(base: str, process: subprocess.Popen | None, log: Path, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process is None or process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{base}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"the server did not become healthy:\n{log.read_text()}")


@contextmanager
def cluster():
    """A Ray cluster of one node: its address."""
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(
        command, env=environment(**TOKEN), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as held:
        assert held.stdout and held.stdin
        for line in held.stdout:
            if found := re.match("cluster at (.*)", line):
                break
        else:
            raise AssertionError("no cluster")
        try:
            yield found[1]
        finally:
            held.stdin.close()
            held.wait()


def wait_until_gone(pids: Iterable[int]) -> None:
    """The workers of a cluster end when they notice that it has, which takes a busy machine a while."""
    while any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.1)


def actors(base: str) -> list[int]:
    """The process ids of a fleet's actors, once all of its replicas are ready and have reported since."""
    for _ in range(1200):
        with suppress(psutil.NoSuchProcess):
            found = [psutil.Process(replica["pid"]).parent() for replica in ready(base)]
            if all(one is not None and "ReplicaActor" in one.name() for one in found):
                return [one.pid for one in found if one]
        time.sleep(0.1)
    raise AssertionError("the actors of the engines are not found")
