"""Traces: one from the caller's span over the replicas to each step of the engine, and the same ids in the logs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import ExitStack
from dataclasses import replace

import httpx
import psutil
import pytest

from kvasir.engine.front import Front
from kvasir.engine.step_notes import MOST, StepNotes
from kvasir.errors import ConfigError
from kvasir.fleet.engine import FleetEngine
from kvasir.plan import StepPlan, Work
from kvasir.serve.settings import ServeSettings
from kvasir.serve.telemetry.spans import TraceContext
from kvasir.types import Delta, FinishReason, Request, SamplingParams, Tokens
from tests.cli.test_replica import command, key  # noqa: F401
from tests.serve.fakes import POISON, EchoEngine, byte_tokenizer, template
from tests.serve.running import live
from tests.serve.telemetry.collector import collecting

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
BODY = {"prompt": "abc", "max_tokens": 6, "temperature": 0}


def traced(collector, **more) -> ServeSettings:
    return ServeSettings(port=0, otlp_endpoint=collector.url, **more)


def children(spans: list[dict], parent: dict) -> list[dict]:
    return sorted(
        (s for s in spans if s.get("parentSpanId") == parent["spanId"]), key=lambda s: int(s["startTimeUnixNano"])
    )


def root_of(spans: list[dict]) -> dict:
    [root] = [span for span in spans if span["kind"] == 2]
    return root


def test_a_request_is_traced_from_its_caller_to_its_steps(tmp_path):
    with collecting() as collector:
        with live(traced(collector, access_log=tmp_path / "log")) as server:
            httpx.post(f"{server.url}/v1/completions", json=BODY, headers=CALLED).raise_for_status()
        spans = collector.spans
    assert collector.paths == {"/v1/traces"} and {span["traceId"] for span in spans} == {TRACE}
    root = root_of(spans)
    assert (
        root["name"] == "POST /v1/completions" and root["parentSpanId"] == CALLER and root["traceState"] == "vendor=1"
    )
    assert root["attributes"]["http.response.status_code"] == 200
    line = json.loads((tmp_path / "log").read_text())
    assert line["trace_id"] == TRACE and line["request_id"] == root["attributes"]["kvasir.request_id"]
    [request] = children(spans, root)
    assert request["attributes"]["gen_ai.usage.output_tokens"] == 6
    steps = children(spans, request)
    assert [span["name"] for span in steps] == ["queue", "prefill", *["decode"] * 5]
    assert steps[1]["attributes"]["tokens"] == 3 and steps[2]["attributes"] == {
        **steps[2]["attributes"], "tokens": 1, "step_rows": 1, "step_tokens": 1,
    }  # fmt: skip
    for outer, inner in ((root, request), *((request, step) for step in steps)):
        assert int(inner["startTimeUnixNano"]) <= int(inner["endTimeUnixNano"])
        assert int(outer["startTimeUnixNano"]) <= int(inner["startTimeUnixNano"]) + 1_000_000


def test_a_fleet_shows_the_replicas_of_a_request():
    fleet = FleetEngine(lambda i: EchoEngine(step_seconds=0.005), 2)
    with collecting() as collector:
        with live(traced(collector), Front(fleet, byte_tokenizer(), template())) as server:
            body = {**BODY, "max_tokens": 60, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                server.ask(fleet.restart_all())
                assert "data: [DONE]" in [*lines]
        spans = collector.spans
    [request] = children(spans, root_of(spans))
    visits = children(spans, request)
    assert [visit["attributes"]["visit"] for visit in visits] == [*range(1, len(visits) + 1)] and len(visits) > 1
    assert {event["name"] for event in request["events"]} == {"moved"} and len(request["events"]) == len(visits) - 1
    for visit in visits:
        names = [span["name"] for span in children(spans, visit)]
        assert names[:2] == ["queue", "prefill"], "what is continued is computed as a prompt"
        assert set(names[2:]) <= {"decode"}


@pytest.mark.parametrize(
    ("header", "count"),
    [(f"00-{TRACE}-{CALLER}-00", 0), (f"00-{'0' * 32}-{CALLER}-01", 1), ("nonsense", 1), (None, 1)],
    ids=["not sampled", "no trace", "nonsense", "none"],
)
def test_the_caller_decides_what_is_traced(header, count):
    with collecting() as collector:
        with live(traced(collector)) as server:
            given = {"traceparent": header} if header else {}
            httpx.post(f"{server.url}/v1/completions", json=BODY, headers=given).raise_for_status()
        roots = [span for span in collector.spans if span["kind"] == 2]
        assert len(roots) == count and not any("parentSpanId" in root for root in roots)
        assert all(root["traceId"] != TRACE for root in roots)


def test_a_share_of_the_requests_is_traced():
    assert not any(TraceContext.new(0.0).sampled for _ in range(100))
    assert all(TraceContext.new(1.0).sampled for _ in range(100))
    assert 0 < sum(TraceContext.new(0.5).sampled for _ in range(200)) < 200


def test_a_collector_that_fails_costs_only_the_spans():
    with collecting() as collector:
        collector.status = 503
        with live(traced(collector)) as server:
            httpx.post(f"{server.url}/v1/completions", json=BODY).raise_for_status()
            meter = server.server.app.state.http_meter
            collector.wait(lambda _: meter.spans["dropped"])
            assert meter.spans["sent"] == 0


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector", "http://", "http://u:p@host", "http://host:x"])
def test_endpoints_that_are_none_are_refused(url):
    with pytest.raises(ConfigError, match="collector"):
        ServeSettings(otlp_endpoint=url)


def test_later_steps_are_one_note():
    notes, params = StepNotes(), SamplingParams(max_tokens=500, seed=0)
    notes.add(Request("r", (1, 2), params, trace="t"))
    plan, found = StepPlan(1, work=(Work(0, 0, 1),)), []
    for i in range(MOST + 50):
        notes.step(plan, [("r", 1), ("other", 1)], 0.001)
        last = i == MOST + 49
        part = (
            Delta("r", 0, (5,), finish_reason=FinishReason.LENGTH)
            if last
            else Tokens(("other", "r"), (0, 0), b"\5\0\0\0" * 2)
        )
        added = notes.attached([part])
        assert [delta.token_ids for delta in added] == [(5,)] * len(added) and len(added) == 2 - last
        assert all(not delta.notes for delta in added if delta.id == "other")
        found += [note for delta in added for note in delta.notes]
    assert [note.name for note in found] == ["queue", "prefill", *["decode"] * (MOST - 1), "steps"]
    assert found[-1].facts == {"count": 50, "tokens": 50} and not notes


@pytest.mark.slow
async def test_the_death_of_a_replica_is_an_event():
    from tests.fleet.fleets import at_both, pid, running
    from tests.sched.drive import request

    async with running(2, step_seconds=0.02) as engine:
        notes: list = []

        async def collect(one: Request) -> None:
            async for delta in engine.submit(one):
                notes.append((delta.id, [note.name for note in delta.notes]))

        header = TraceContext(TRACE).header(CALLER)
        asked = [replace(request(f"r{i}", [i], max_tokens=40, seed=i), trace=header) for i in range(6)]
        tasks = [asyncio.create_task(collect(one)) for one in asked]
        await at_both(engine)
        os.kill(pid(engine.replicas[0]), signal.SIGKILL)
        await asyncio.gather(*tasks)
        names = {one.id: [name for id, some in notes for name in some if id == one.id] for one in asked}
        lost = [some for some in names.values() if "lost" in some]
        assert lost and all(some.count("replica") == 2 for some in lost)
        assert all(some[:3] == ["replica", "queue", "prefill"] for some in names.values())


def test_lines_about_faults_have_the_ids_of_the_request(caplog):
    with live() as server:
        headers = {**CALLED, "X-Request-Id": "mine"}
        failed = httpx.post(f"{server.url}/v1/completions", json={**BODY, "prompt": POISON}, headers=headers)
        assert failed.status_code == 500
    assert f"(request mine, trace {TRACE})" in caplog.text


@pytest.mark.slow
def test_a_trace_goes_through_all_processes(key):  # noqa: F811
    """An API worker, the router in the main process, and a replica of two ranks behind TCP."""
    small = ("kvasir-mini", "--threads", "2", "--num-blocks", "60")
    with collecting() as collector, ExitStack() as stack:
        ranks = ("--tensor-parallel", "2", "--replica-key", key, "--port", "0")
        process, address = stack.enter_context(command("replica", *small, *ranks))
        front = ("--replica", address, "--replica-key", key, "--api-workers", "2")
        serve = ("serve", "kvasir-mini", "--port", "0", *front, "--otlp-traces-endpoint", collector.url)
        _, url = stack.enter_context(command(*serve))
        body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, headers=CALLED, timeout=120).raise_for_status()
        spans = collector.wait(lambda some: any(span["kind"] == 2 for span in some))
        [request] = children(spans, root_of(spans))
        [visit] = children(spans, request)
        assert visit["name"] == "replica 0"
        names = [span["name"] for span in children(spans, visit)]
        assert names[:2] == ["queue", "prefill"] and "decode" in names, names
        [queue] = [span for span in spans if span["name"] == "queue"]
        assert queue["attributes"]["pid"] in [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
