"""Fleets on Ray, by the command of the container: kills, restarts and scaling under streams of several dialects."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from kvasir.cli.app import app
from tests.cli.cluster.rays import SMALL, actors, cluster, fleet, wait_until_gone
from tests.e2e.server import serving
from tests.fleet.test_serve import ASKED, comparable, ready, streamed, views
from tests.fleet.test_serve import SMALL as FLAGS

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def command(base: str, *words: str) -> str:
    result = CliRunner().invoke(app, ["fleet", *words, "--url", base])
    assert result.exit_code == 0, result.exception
    return result.output


def test_streams_survive_killed_actors_restarts_and_scaling(tmp_path):
    with serving("kvasir-mini", *FLAGS) as (base, _):
        plain = {path: comparable(streamed(base, path)) for path in ASKED}
    model = {**SMALL, "replicas": 2, "max_replicas": 3}
    with fleet(tmp_path, {"ray": {"num_cpus": 4}, "models": [model]}) as (base, _), ThreadPoolExecutor(16) as pool:
        first = actors(base)
        got = [pool.submit(streamed, base, path) for path in ASKED for _ in range(3)]
        while not all(r["open"] for r in views(base)):
            assert not all(one.done() for one in got)
        os.kill(first[0], signal.SIGKILL)
        for path, one in zip([p for p in ASKED for _ in range(3)], got, strict=True):
            assert comparable(one.result()) == plain[path], path
        while not views(base)[0]["restarts"] or actors(base)[0] == first[0]:
            time.sleep(0.1)  # until Ray has started the actor again

        def harm() -> None:
            time.sleep(0.1)
            command(base, "scale", "3")
            command(base, "restart", "1", "--grace", "0.1")
            command(base, "scale", "1")

        harming = pool.submit(harm)
        while not harming.done():
            assert all(comparable(streamed(base, path)) == plain[path] for path in ASKED)
        harming.result()
        assert [r["status"] for r in ready(base)] == ["ready"]
        assert "ready" in command(base, "status")


def test_actors_outlive_their_server_in_a_cluster_that_was_there(tmp_path):
    config = {"name": "outlives", "models": [{**SMALL, "replicas": 2}]}
    with cluster() as address:
        with fleet(tmp_path, config, "--ray-address", address) as (base, server):
            before = actors(base)
            answer = comparable(streamed(base, "/v1/completions"))
            server.kill()
            server.wait()
        with fleet(tmp_path, config, "--ray-address", address) as (base, server):
            assert actors(base) == before, "the engines that were there"
            assert comparable(streamed(base, "/v1/completions")) == answer
            server.kill()
            server.wait()
        config["models"][0]["num_blocks"] = 48
        with fleet(tmp_path, config, "--ray-address", address) as (base, _):
            after = actors(base)
            assert not {*after} & {*before}, "engines with other options"
            assert comparable(streamed(base, "/v1/completions")) == answer
        wait_until_gone((*before, *after))
