"""GET /fleet and the routes that change replicas, on a server of several models; `kvasir fleet` shows all of them."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import asdict

import httpx
import pytest
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.config import EngineOptions
from kvasir.engine.client import FleetScale, ReplicaView
from kvasir.engine.front import Front
from kvasir.serve.app import create_app
from tests.serve.fakes import EchoEngine
from tests.serve.running import make_front
from tests.serve.shelf import Launcher, several


class Replicas(EchoEngine):
    """An engine that reports replicas, and what it was told to do with them."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.count = 2
        self.told: list[object] = []

    @property
    def scaling(self) -> FleetScale | None:
        return FleetScale(self.count, 1, 3)

    @property
    def views(self) -> tuple[ReplicaView, ...]:
        return tuple(ReplicaView(index, "ready") for index in range(self.count))

    async def restart_replica(self, index: int, grace: float = 0.0) -> None:
        self.told.append(index)

    async def restart_all(self, grace: float = 0.0) -> None:
        self.told.append("all")

    async def scale(self, count: int, grace: float = 0.0) -> None:
        self.count = count


class Fleets(Launcher):
    """Models `a` and `c` have replicas."""

    async def __call__(self, options: EngineOptions) -> Front:
        front = make_front((Replicas if options.model in "ac" else EchoEngine)(info={"name": options.model}))
        await front.start()
        self.launched.append((options, front))
        return front


@asynccontextmanager
async def served():
    async with several(Fleets(), keep_alive=-1.0, max_loaded=3) as catalogue:
        transport = httpx.ASGITransport(create_app(catalogue))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http


async def load(http: httpx.AsyncClient, *names: str) -> None:
    for name in names:
        wire = {"model": name, "prompt": "x", "max_tokens": 1}
        assert (await http.post("/v1/completions", json=wire)).status_code == 200


async def test_each_model_shows_and_changes_its_own_replicas():
    async with served() as http:
        assert (await http.get("/fleet")).status_code == 404, "nothing is loaded"
        await load(http, "b", "a", "c")
        first = (await http.get("/fleet")).json()
        assert first["models"] == ["a", "c"] and first["model"] == "a" and len(first["replicas"]) == 2
        scaled = await http.post("/fleet/scale", params={"model": "c"}, json={"replicas": 3})
        assert scaled.json()["model"] == "c" and len(scaled.json()["replicas"]) == 3
        counts = [len((await http.get("/fleet", params={"model": m})).json()["replicas"]) for m in "ac"]
        assert counts == [2, 3]
        for path in ("/fleet/restart", "/fleet/replicas/1/restart"):
            assert (await http.post(path, params={"model": "c"}, json={})).json()["model"] == "c"


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_model_without_replicas_or_that_is_not_loaded_is_named(method):
    async with served() as http:
        await load(http, "a", "b")
        path, wire = ("/fleet", None) if method == "GET" else ("/fleet/restart", {})
        for name, words in (("b", "has no replicas"), ("c", "is not loaded"), ("d", "does not exist")):
            refused = await http.request(method, path, params={"model": name}, json=wire)
            assert refused.status_code == 404 and words in refused.json()["error"]["message"], refused.text


def test_the_command_shows_all_models(monkeypatch):
    views = {"a": [asdict(ReplicaView(0, "ready", role="prefill"))], "c": []}
    asked = []

    def ask(url, key, method, path, body=None, seconds=0.0):
        asked.append((method, path))
        name = path.partition("?model=")[2] or "a"
        return {"model": name, "models": ["a", "c"], "replicas": views[name], "scaling": None}

    monkeypatch.setattr("kvasir.cli.store.ask", ask)
    result = CliRunner().invoke(app, ["fleet", "status"])
    assert result.exit_code == 0, result.exception
    assert result.output.index("model a") < result.output.index("0 (prefill)") < result.output.index("model c")
    alone = CliRunner().invoke(app, ["fleet", "status", "--model", "c"])
    assert alone.exit_code == 0 and "ready" not in alone.output
    both = CliRunner().invoke(app, ["fleet", "status", "--json"])
    assert [one["model"] for one in json.loads(both.output)["models"]] == ["a", "c"]
    CliRunner().invoke(app, ["fleet", "scale", "2", "--model", "org/c d"])
    assert asked[-1] == ("POST", "/fleet/scale?model=org%2Fc%20d")
