"""Adapters in an engine: loaded when requests need them, whatever else happens, without another token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvasir.engine.adapter_loader import make_adapters
from kvasir.engine.adapters import AdapterNames
from kvasir.engine.core import EngineCore
from kvasir.engine.fake import FakeEngine
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ModelNotFound
from kvasir.inputs import Adapter
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.types import AdapterInfo, FinishReason, Request, SamplingParams, ServiceClass
from tests.engine.test_process import collect, until
from tests.sched.drive import by_hand

SIZES: dict[str, Any] = {"num_blocks": 600, "max_rows": 16, "max_tokens_per_step": 128}
PROMPT = tuple(range(40))


def written(folder: Path, name: str, text: str | None = None) -> str:
    if text or not (folder / name).exists():
        (folder / name).write_text(text or f"the adapter {name}")
    return str(folder / name)


def ask(id: str, *adapters: Adapter, prompt: tuple[int, ...] = PROMPT, tokens: int = 6) -> Request:
    return Request(id, prompt, SamplingParams(max_tokens=tokens, seed=0), adapters=adapters)


def answer_of(request: Request, *infos: AdapterInfo) -> list[int]:
    """The tokens of a request alone, with these adapters under its names."""
    contents = {info.name: info.content for info in infos}
    adapters = tuple(replace(a, content=contents[a.name]) for a in request.adapters)
    return by_hand(replace(request, adapters=adapters), 256, 512)[0]


# -- the core ----------------------------------------------------------------------------------------------------------


class Bench:
    """A core, and the names of its adapters."""

    def __init__(self, folder: Path, **options: Any):
        self.folder, self.names = folder, AdapterNames()
        self.runner = FakeRunner(**{**SIZES, "max_loras": 4, **options})
        scheduler = Scheduler(self.runner.capacity, adapters=make_adapters(self.runner, self.runner.info))
        self.core = EngineCore(self.runner, scheduler)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}

    def load(self, name: str, text: str | None = None) -> AdapterInfo:
        info = replace(self.runner.read_adapter(written(self.folder, name, text)), name=name)
        self.names.put(info)
        return info

    def add(self, request: Request) -> None:
        self.tokens[request.id] = []
        self.core.add(self.names.resolve(request))

    def step(self) -> None:
        for delta in self.core.step():
            self.tokens[delta.id] += delta.token_ids
            if delta.finish_reason:
                self.ends[delta.id] = delta

    def by_name(self) -> tuple[dict[str, int], dict[str, int]]:
        stats = self.core.stats()
        return stats.adapters_running, stats.adapters_waiting

    def drain(self) -> None:
        while self.core.has_work():
            self.step()
            self.core.check()


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_thousand_adapters_of_which_64_fit(tmp_path, overlaps):
    """The popularity of adapters follows Zipf's law, as that of anything with names."""
    chance = random.Random(0)
    bench = Bench(tmp_path, max_loras=64, overlaps=overlaps)
    infos = [bench.load(f"a{i}") for i in range(1000)]
    weights = [1 / (1 + i) for i in range(1000)]
    asked = []
    for i in range(150):
        adapter = Adapter(chance.choices(infos, weights)[0].name, chance.choice([1.0, 0.5]))
        asked.append(ask(f"r{i}", adapter, prompt=tuple(chance.choices(range(99), k=20)), tokens=4))
        bench.add(asked[-1])
        bench.step()
    bench.drain()
    for request in asked:
        assert bench.tokens[request.id] == answer_of(request, *infos), request.id
    stats = bench.core.stats()
    used = {request.adapters[0].name for request in asked}
    assert stats.adapters_loads >= len(used) > 64 == stats.adapters_resident
    assert stats.adapters_evictions >= len(used) - 64
    assert sum(stats.adapters_load_seconds.counts) == stats.adapters_loads and stats.adapters_load_seconds.sum > 0
    bench.core.close()


def test_no_step_waits_for_a_load(tmp_path, monkeypatch):
    """A load that never ends: others join, run and end meanwhile, also those after it in the queue."""
    bench = Bench(tmp_path)
    bench.load("slow")
    gate, pack = threading.Event(), bench.runner.pack_adapter
    monkeypatch.setattr(bench.runner, "pack_adapter", lambda *file: gate.wait(60) and pack(*file))
    bench.add(ask("r", Adapter("slow")))
    for i in range(3):
        bench.add(ask(f"plain {i}"))
        while f"plain {i}" not in bench.ends:
            bench.step()
    assert "r" not in bench.ends and bench.by_name() == ({}, {"slow": 1})
    gate.set()
    while not bench.by_name()[0]:
        bench.step()
    assert bench.by_name() == ({"slow": 1}, {})
    bench.drain()
    assert bench.ends["r"].finish_reason is FinishReason.LENGTH


def test_a_request_takes_no_row_from_another_before_its_adapter_is_there(tmp_path, monkeypatch):
    bench, gate = Bench(tmp_path, max_rows=1), threading.Event()
    bench.load("a")
    pack = bench.runner.pack_adapter
    monkeypatch.setattr(bench.runner, "pack_adapter", lambda *file: gate.wait(60) and pack(*file))
    bench.add(replace(ask("patient", tokens=60), slo=ServiceClass.BACKGROUND))
    bench.step()
    bench.add(ask("urgent", Adapter("a")))
    for _ in range(10):
        bench.step()
    assert bench.core.scheduler.preemptions == 0 and len(bench.tokens["patient"]) >= 10
    gate.set()
    assert bench.core.scheduler.adapters.wait(60)
    bench.drain()
    assert bench.core.scheduler.preemptions == 1 and list(bench.ends) == ["urgent", "patient"]


def test_a_prefix_before_the_first_position_is_shared_with_the_base_model(tmp_path):
    bench = Bench(tmp_path, block_size=8)
    info = bench.load("a")
    for request in (ask("base"), ask("later", Adapter("a", start=30)), ask("again", Adapter("a", start=30))):
        bench.add(request)
        bench.drain()
        assert bench.tokens[request.id] == answer_of(request, info)
    assert [bench.ends[id].cached_tokens for id in ("base", "later", "again")] == [0, 30, 39]


def test_a_name_with_other_content_shares_nothing_and_the_same_content_all(tmp_path):
    bench = Bench(tmp_path, block_size=8)
    cached = []
    for id, text in (("1", "one"), ("2", "one"), ("3", "two"), ("4", "one")):
        info = bench.load("a", text)
        request = ask(id, Adapter("a"))
        bench.add(request)
        bench.drain()
        assert bench.tokens[id] == answer_of(request, info)
        cached.append(bench.ends[id].cached_tokens)
    assert cached == [0, 39, 0, 39]


def test_an_adapter_that_changed_on_disk_is_an_error_and_not_another_text(tmp_path):
    bench = Bench(tmp_path)
    bench.load("a")
    written(tmp_path, "a", "something else")
    bench.add(ask("changed", Adapter("a")))
    bench.add(ask("plain"))
    bench.drain()
    assert "has changed on disk" in bench.ends["changed"].error and not bench.tokens["changed"]
    assert bench.ends["plain"].finish_reason is FinishReason.LENGTH
    (tmp_path / "a").unlink()
    bench.add(ask("gone", Adapter("a")))
    bench.drain()
    assert "cannot be read" in bench.ends["gone"].error


def test_several_adapters_apply_in_the_order_of_the_request(tmp_path):
    bench = Bench(tmp_path)
    infos = [bench.load(name) for name in "ab"]
    one, other = ask("ab", Adapter("a"), Adapter("b", 0.5)), ask("ba", Adapter("b", 0.5), Adapter("a"))
    bench.add(ask("first", Adapter("b")))  # so b has the lower id
    bench.drain()
    for request in (one, other):
        bench.add(request)
        bench.drain()
        assert bench.tokens[request.id] == answer_of(request, *infos)
    assert bench.tokens["ab"] != bench.tokens["ba"]


def test_an_adapter_without_effect_is_left_out(tmp_path):
    bench = Bench(tmp_path)
    bench.load("a")
    bench.add(ask("none", Adapter("a", 0.0)))
    bench.drain()
    assert bench.tokens["none"] == answer_of(ask("none")) and bench.core.stats().adapters_loads == 0


def test_a_step_that_cannot_install_an_adapter_ends_only_its_request(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    info = bench.load("a")
    bench.add(ask("plain", tokens=30))
    bench.step()
    honest, broken = bench.runner.set_adapter, [True]

    def fails(adapter: int, packed: Any) -> None:
        if broken[0] and packed is not None:
            raise MemoryError("no room for it")
        honest(adapter, packed)

    monkeypatch.setattr(bench.runner, "set_adapter", fails)
    bench.add(ask("r", Adapter("a")))
    bench.drain()
    assert "no room for it" in bench.ends["r"].error
    assert bench.tokens["plain"] == answer_of(ask("plain", tokens=30))
    broken[0] = False
    request = ask("again", Adapter("a"))
    bench.add(request)
    bench.drain()
    assert bench.tokens["again"] == answer_of(request, info)


# -- whole engines -----------------------------------------------------------------------------------------------------

ENGINES = {"in process": lambda **o: FakeEngine(**o), "process": lambda **o: ProcessEngine(fake=o)}


def run(test: Any) -> None:
    asyncio.run(test())


async def answers(engine: Any, request: Request) -> list[int]:
    return (await collect(engine, request))[0]


@pytest.mark.parametrize("kind", ENGINES)
def test_names_change_while_requests_run(kind, tmp_path):
    """Those that run keep what they began with."""

    async def test() -> None:
        engine = ENGINES[kind](**{**SIZES, "max_loras": 2, "step_seconds": 0.002})
        await engine.start()
        first = await engine.load_adapter("a", written(tmp_path, "a1"))
        running = ask("running", Adapter("a"), tokens=60)
        task = asyncio.create_task(collect(engine, running, got := {}))
        await until(lambda: got)
        second = await engine.load_adapter("a", written(tmp_path, "a2"), replace=True)
        fresh = ask("fresh", Adapter("a"))
        assert await answers(engine, fresh) == answer_of(fresh, second)
        await engine.unload_adapter("a")
        with pytest.raises(ModelNotFound):
            await answers(engine, ask("late", Adapter("a")))
        assert (await task)[0] == answer_of(running, first) != answer_of(running, second)
        await until_async(engine, lambda stats: stats.adapters_resident == 0)
        await engine.check()
        await engine.stop()

    run(test)


async def until_async(engine: Any, holds: Any) -> None:
    for _ in range(500):
        if holds(await engine.stats()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(await engine.stats())


@pytest.mark.parametrize("kind", ENGINES)
def test_loads_and_unloads_in_flight(kind, tmp_path):
    async def test() -> None:
        engine = ENGINES[kind](**{**SIZES, "max_loras": 3})
        await engine.start()
        chance = random.Random(1)
        texts = {f"a{i}": 0 for i in range(6)}
        infos = {name: await engine.load_adapter(name, written(tmp_path, f"{name} 0")) for name in texts}
        tasks = []
        for i in range(60):
            name = chance.choice(list(texts))
            request = ask(f"r{i}", Adapter(name), prompt=tuple(range(i % 7 + 1)))
            tasks.append((request, infos[name], asyncio.create_task(answers(engine, request))))
            await asyncio.sleep(0)  # it is on its way
            if i % 4 == 0:
                texts[name] += 1
                path = written(tmp_path, f"{name} {texts[name]}")
                infos[name] = await engine.load_adapter(name, path, replace=True)
            if i % 10 == 5:
                await engine.unload_adapter(name)
                infos[name] = await engine.load_adapter(name, written(tmp_path, f"{name} {texts[name]}"))
        for request, info, task in tasks:
            assert await task == answer_of(request, info), request.id
        await engine.check()
        stats = await engine.stats()
        assert stats.adapters_registered == 6 and stats.adapters_resident <= 3
        await engine.stop()

    run(test)


def test_a_restarted_engine_has_the_adapters_of_its_requests(tmp_path):
    """Also one that has lost its name by then; a pinned one is in memory again."""

    async def test() -> None:
        engine = ProcessEngine(fake={**SIZES, "max_loras": 3, "step_seconds": 0.005})
        await engine.start()
        infos = [await engine.load_adapter(name, written(tmp_path, name), pinned=name == "c") for name in "abc"]
        asked = [ask(f"r{info.name}", Adapter(info.name, 0.5), tokens=60) for info in infos[:2]]
        seen: list[dict] = [{}, {}]
        tasks = [asyncio.create_task(collect(engine, r, got)) for r, got in zip(asked, seen, strict=True)]
        await until(lambda: all(seen))
        await engine.unload_adapter("a")
        changed = await engine.load_adapter("b", written(tmp_path, "b2"), replace=True)
        os.kill(engine.pid, signal.SIGKILL)
        for request, info, task in zip(asked, infos, tasks, strict=False):
            assert (await task)[0] == answer_of(request, info)
        fresh = ask("fresh", Adapter("b"))
        assert await answers(engine, fresh) == answer_of(fresh, changed)
        assert engine.restarts == 1 and [info.name for info in engine.adapters] == ["b", "c"]
        await until_async(engine, lambda stats: stats.adapters_resident >= 2)
        await engine.check()
        await engine.stop()

    run(test)


def test_a_request_whose_adapter_changed_before_a_restart_ends_with_an_error(tmp_path):
    async def test() -> None:
        engine = ProcessEngine(fake={**SIZES, "max_loras": 3, "step_seconds": 0.005})
        await engine.start()
        await engine.load_adapter("a", written(tmp_path, "a"))
        deltas: list[Any] = []

        async def read() -> None:
            async for delta in engine.submit(ask("r", Adapter("a"), tokens=60)):
                deltas.append(delta)

        task = asyncio.create_task(read())
        await until(lambda: deltas)
        written(tmp_path, "a", "something else")
        os.kill(engine.pid, signal.SIGKILL)
        await task
        assert "has changed on disk" in deltas[-1].error
        await engine.check()
        await engine.stop()

    run(test)
