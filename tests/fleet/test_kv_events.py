"""`kvasir serve --replicas 2 --kv-events`: routers of others follow each replica's prefix cache."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys

import httpx
import pytest

from tests.e2e.server import serving
from tests.engine.kv_subscriber import Subscriber

SMALL = ("--max-model-len", "512", "--num-blocks", "64", "--block-size", "16")


def free_ports(count: int) -> int:
    """The first of as many that follow one another."""
    for first in range(21000, 30000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for i, one in enumerate(sockets):
                one.bind(("127.0.0.1", first + i))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no ports are free")


@pytest.mark.slow
async def test_each_replica_publishes_its_cache():
    port = free_ports(4)
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv@pod@m"}
    config |= {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + 2}"}
    flags = ("--kv-events-config", json.dumps(config))
    with serving("kvasir-mini", *SMALL, "--replicas", "2", *flags) as (base, _):
        async with httpx.AsyncClient(timeout=120) as client:
            for i in range(4):
                body = {"model": "kvasir-mini", "prompt": f"Tale {i}. " * 30, "max_tokens": 2}
                assert (await client.post(f"{base}/v1/completions", json=body)).status_code == 200
            ids = (
                await client.post(f"{base}/tokenize", json={"model": "kvasir-mini", "prompt": "Tale 3. " * 30})
            ).json()
            metrics = (await client.get(f"{base}/metrics")).text
        prefixes = set()
        for rank in range(2):
            reader = Subscriber(f"tcp://127.0.0.1:{port + rank}", f"tcp://127.0.0.1:{port + 2 + rank}")
            await asyncio.wait_for(reader.catch_up(), 60)
            assert reader.mirror.rank == rank
            prefixes |= reader.mirror.prefixes()
            reader.close()
        assert tuple(ids["tokens"][:64]) in prefixes and "kvasir_kv_event_batches_total" in metrics
        command = [sys.executable, "-m", "kvasir.cli", "serve", "kvasir-mini", "--port", "0", *flags]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert done.returncode == 2 and f"127.0.0.1:{port}: it is in use" in done.stderr


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        (("kvasir-mini", "--no-prefix-cache", "--kv-events", "{}"), "have a prefix cache"),
        (("kvasir-mini", "kvasir-tiny", "--kv-events", "{}"), "single model"),
        (("kvasir-mini", "--kv-events", "{}"), "enable_kv_cache_events"),
    ],
)
@pytest.mark.slow
def test_options_that_do_not_fit(flags, wrong):
    done = subprocess.run([sys.executable, "-m", "kvasir.cli", "serve", *flags], capture_output=True, text=True)
    assert done.returncode == 2 and wrong in " ".join(done.stderr.split())
