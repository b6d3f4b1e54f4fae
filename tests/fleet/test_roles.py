"""A fleet of real engines of which some compute prompts and others continue them: answers are those of one engine, bit
for bit, whoever dies."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.replicas import with_role
from kvasir.config import EngineOptions
from kvasir.engine.journal import SUSPECT_LIVES
from kvasir.engine.subprocess import ProcessEngine
from kvasir.environment import contents_dir
from kvasir.errors import ConfigError
from kvasir.fleet.engine import FleetEngine
from kvasir.fleet.replica import Replica, Routed
from kvasir.types import Request, SamplingParams
from kvasir.weights.content import content_of
from kvasir.weights.find import find_model
from tests.engine.cores import core_of
from tests.engine.test_process import until
from tests.engine.test_tier_models import needs_native
from tests.oracle import Answer, Answers, mixed_requests, plain, same

PATIENCE = 600.0  # seconds, on a machine that is busy with other tests
OPTIONS = EngineOptions("kvasir-mini", block_size=16, num_blocks=80, threads=1)
REQUESTS = [replace(r, id=f"q{i}") for i, r in enumerate(mixed_requests(2000, 400, longest=150, count=20, seed=5))]


@pytest.fixture(scope="module")
def expected() -> Answers:
    core = core_of("kvasir-mini", block_size=16, num_blocks=80, threads=1)
    found = plain(core, REQUESTS)
    core.close()
    return found


@asynccontextmanager
async def fleet(folder: Path, prefill: int = 1, decode: int = 1) -> AsyncIterator[FleetEngine]:
    chosen = FleetOptions(prefill_replicas=prefill, decode_replicas=decode)
    sockets = [str(folder / f"run{i}" / "blocks") for i in range(decode)]

    def make(index: int) -> ProcessEngine:
        return ProcessEngine(with_role(OPTIONS, chosen, index, sockets), hands_over=True, patient=True)

    engine = FleetEngine(make, chosen.count)
    await engine.start()
    try:
        yield engine
        await until(lambda: all(r.takes for r in engine.replicas), PATIENCE)
        await engine.check()
    finally:
        await engine.stop()


async def answer(engine: FleetEngine, request: Request, answers: Answers) -> None:
    for i in range(request.params.n):
        answers[request.id, i] = Answer()
    async for delta in engine.submit(request):
        answers[request.id, delta.index].take(delta)


async def all_of(engine: FleetEngine) -> Answers:
    answers: Answers = {}
    await asyncio.wait_for(asyncio.gather(*(answer(engine, r, answers) for r in REQUESTS)), PATIENCE)
    return answers


async def again_and_again(engine: FleetEngine, expected: Answers, done: asyncio.Event, copies: int = 1) -> None:
    """Each time with another salt, so that no replica has the prompts, and with the same ids, of which a replica may
    still send tokens of the time before."""

    async def one(copy: int) -> None:
        answers: Answers = {}
        salt = str(next(salts))
        requests = [replace(r, id=f"{r.id} {copy}", cache_salt=salt) for r in REQUESTS]
        await asyncio.wait_for(asyncio.gather(*(answer(engine, r, answers) for r in requests)), PATIENCE)
        same(expected, {(id.split()[0], i): found for (id, i), found in answers.items()})

    salts = itertools.count()
    while not done.is_set():
        await asyncio.gather(*map(one, range(copies)))


async def stats_of(engine: FleetEngine) -> list:
    return [await r.engine.stats() for r in engine.replicas]


@needs_native
async def test_prompts_are_computed_by_one_and_continued_by_the_other(tmp_path, monkeypatch, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for file in find_model("kvasir-mini").weights:  # until the weights are identified, no blocks are exchanged
        content_of(file, contents_dir(), threading.Event())
    async with fleet(tmp_path) as engine:
        same(expected, await all_of(engine))
        first, second = await stats_of(engine)
        long = [r for r in REQUESTS if len(r.prompt_ids) >= 16 and r.params.max_tokens != 1]
        assert engine.replicas[0].counts.routed >= len(long) > 8
        assert second.tier_loaded_tokens > 0.7 * sum(len(r.prompt_ids) // 16 * 16 for r in long)
        assert second.prompt_tokens < first.prompt_tokens
        assert second.generated_tokens > first.generated_tokens


@needs_native
@pytest.mark.slow
async def test_conversations_stay_where_their_prefix_is(tmp_path, monkeypatch):
    """The second prompt continues the first answer, which only the decode replica has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    params = SamplingParams(temperature=0.0, max_tokens=40, seed=0, ignore_eos=True)
    first = Request("first", tuple(range(100, 200)), params)
    async with fleet(tmp_path) as engine:
        told: Answers = {}
        await answer(engine, first, told)
        second = Request("second", (*first.prompt_ids, *told["first", 0].tokens, *range(300, 320)), params)
        routed = [r.counts.routed for r in engine.replicas]
        await until(lambda: engine.replicas[1].predicted(Routed.of(second, 0.0)) >= 128)  # type: ignore[arg-type]
        await answer(engine, second, told)
        assert [r.counts.routed for r in engine.replicas] == [routed[0], routed[1] + 1]


def may_die(replica: Replica) -> bool:
    """Whether it has requests, and none of them would be a suspect after one more death: alone in an engine, that would
    be refused."""
    entries = replica.open.values()
    return bool(entries) and replica.takes and not any(e.deaths or e.lives + 1 >= SUSPECT_LIVES for e in entries)


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
async def test_deaths_cost_time_only(tmp_path, monkeypatch, expected, count):
    """Each replica dies several times, at random moments."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rng, done = random.Random(count), asyncio.Event()
    async with fleet(tmp_path, count, count) as engine:
        work = asyncio.create_task(again_and_again(engine, expected, done, 2 * count))
        for replica in engine.replicas * 3:
            able = partial(may_die, replica)
            await until(able, PATIENCE)
            await asyncio.sleep(rng.random() * 0.3)
            await until(able, PATIENCE)
            restarts = replica.restarts
            os.kill(replica.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            await until(lambda replica=replica, restarts=restarts: replica.restarts > restarts, PATIENCE)
        done.set()
        await work


@needs_native
@pytest.mark.slow
async def test_all_are_replaced_under_load(tmp_path, monkeypatch, expected):
    """While one is away, nothing is known of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = asyncio.Event()
    async with fleet(tmp_path) as engine:
        work = asyncio.create_task(again_and_again(engine, expected, done))
        await until(lambda: all(r.open for r in engine.replicas))
        await engine.restart_all()
        done.set()
        await work


@pytest.mark.parametrize(
    ("fleet", "engine", "message"),
    [
        ({"prefill_replicas": 1}, {}, "belong together"),
        ({"prefill_replicas": 0, "decode_replicas": 1}, {}, "expected 1 to"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "replicas": 3}, {}, "their sum"),
        ({"prefill_replicas": 1, "decode_replicas": 1, "max_replicas": 4}, {}, "--max-replicas"),
        ({"prefill_replicas": 1, "decode_replicas": 1}, {"prefix_cache": False}, "--no-prefix-cache"),
        ({"prefill_replicas": 1, "decode_replicas": 1}, {"transfer_listen": "/x/y"}, "--transfer-listen"),
    ],
)
def test_contradictory_options_are_refused(fleet, engine, message):
    with pytest.raises(ConfigError) as error:
        FleetOptions(**fleet).check(replace(OPTIONS, **engine), alone=True)
    assert message in f"{error.value} {error.value.hint}"


def test_roles_by_index():
    chosen = FleetOptions(prefill_replicas=2, decode_replicas=2)
    found = [with_role(OPTIONS, chosen, i, ["/a/x", "/b/x"]) for i in range(4)]
    assert [o.role for o in found] == ["prefill", "prefill", "decode", "decode"]
    assert [o.transfer_listen for o in found] == [None, None, "/a/x", "/b/x"]
    assert found[1].transfer_peer == ["/a/x", "/b/x"] and chosen.count == chosen.most == 4
    assert with_role(OPTIONS, FleetOptions(), 0, []) is OPTIONS
