"""The engine in its own process over the FakeRunner: streams, deaths, resumption, poison requests, and no leaks."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kvasir.config import EngineOptions
from kvasir.engine import spawning
from kvasir.engine.fake import FakeEngine
from kvasir.engine.subprocess import ProcessEngine
from kvasir.environment import socket_base
from kvasir.errors import EngineDead, InvalidRequest, KvasirError
from kvasir.statistics import EngineStats
from kvasir.types import FinishReason
from tests.engine.hosting import Hosted
from tests.sched.drive import by_hand, request
from tests.sched.inputs import random_inputs, sources_of

FAKE = {"vocab_size": 256, "num_blocks": 200, "max_rows": 16, "max_model_len": 512, "step_seconds": 0.004}


async def collect(engine, req, answers: dict[int, list[int]] | None = None) -> dict[int, list[int]]:
    """answers: grows with what arrives."""
    answers = {} if answers is None else answers
    async for delta in engine.submit(req):
        answers.setdefault(delta.index, []).extend(delta.token_ids)
        assert delta.finish_reason is not FinishReason.ERROR, delta
    return answers


def expected(req) -> dict[int, list[int]]:
    return dict(enumerate(by_hand(req, 256, 512)))


@pytest.fixture(params=["inproc", "process", "remote"])
async def engine(request):
    engine = ProcessEngine(fake=FAKE) if request.param == "process" else FakeEngine(**FAKE)
    engine = Hosted(engine) if request.param == "remote" else engine
    await engine.start()
    yield engine
    await engine.stop()


async def test_many_streams_at_once(engine):
    requests = [request(f"r{i}", [i, 2 * i], max_tokens=20, n=1 + i % 3, seed=i, temperature=1.0) for i in range(12)]
    answers = await asyncio.gather(*(collect(engine, r) for r in requests))
    assert answers == [expected(r) for r in requests]
    await engine.check()
    assert (await engine.stats()).blocks_used == 0


async def test_a_reader_that_is_late_gets_several_tokens_at_once():
    engine = ProcessEngine(fake={**FAKE, "step_seconds": 0.0})
    await engine.start()
    asked = request("a", [1, 2], max_tokens=400, temperature=0.0)
    stream = engine.submit(asked)
    found = [await anext(stream)]
    assert len(found[0].token_ids) == 1, "the first token is never held back"
    time.sleep(0.3)
    found += [delta async for delta in stream]
    await engine.stop()
    assert max(len(delta.token_ids) for delta in found) > 1
    assert [id for delta in found for id in delta.token_ids] == expected(asked)[0]


async def test_embeddings_and_positions_travel(engine):
    """With the sources of what is to be encoded."""
    requests = []
    for i in range(8):
        given = random_inputs(random.Random(i), 40)
        one = request(f"r{i}", list(range(40)), max_tokens=6)
        requests.append(replace(one, inputs=given, sources=sources_of(given)))
    assert any(r.inputs.positions for r in requests) and any(r.sources for r in requests)
    answers = await asyncio.gather(*(collect(engine, r) for r in requests))
    assert answers == [expected(r) for r in requests]
    await engine.check()


async def test_a_refusal_reaches_its_caller_alone(engine):
    good = asyncio.create_task(collect(engine, request("good", [1], max_tokens=30)))
    with pytest.raises(InvalidRequest, match="context"):
        await collect(engine, request("bad", [1] * 600))
    assert len((await good)[0]) == 30


async def test_an_abandoned_stream_releases_everything(engine):
    stream = engine.submit(request("a", [1, 2], max_tokens=400, n=3))
    async for _ in stream:
        break
    await stream.aclose()
    other = asyncio.create_task(collect(engine, request("b", [3], max_tokens=400)))
    await asyncio.sleep(0.02)
    await engine.abort("b")
    await other
    for _ in range(100):
        stats = await engine.stats()
        if stats.running == stats.waiting == 0:
            break
        await asyncio.sleep(0.01)
    assert stats.blocks_used == 0 and stats.aborted == 4
    await engine.check()


@pytest.mark.few(1)
async def test_aborting_one_choice_leaves_the_others(engine):
    asked = request("a", [1, 2], max_tokens=200, n=3)
    task = asyncio.create_task(collect(engine, asked, got := {}))
    await until(lambda: got)
    await engine.abort("a", 1)
    answers, whole = await asyncio.wait_for(task, 60), expected(asked)
    assert (answers[0], answers[2]) == (whole[0], whole[2])
    assert len(answers[1]) < 200 and answers[1] == whole[1][: len(answers[1])]
    stats = await engine.stats()
    assert (stats.aborted, stats.running, stats.blocks_used) == (1, 0, 0)


@pytest.mark.parametrize("how", ["leaves", "aborts", "aborts a choice"])
async def test_an_id_used_again_gets_no_tokens_of_the_request_before(engine, how):
    """What the engine has sent of that one may still be on its way."""
    for turn in range(20):
        before = engine.submit(request("same", [1 + turn], max_tokens=100))
        await anext(before)
        if how != "leaves":
            await engine.abort("same", 0 if how == "aborts a choice" else None)
            assert [d.finish_reason async for d in before][-1] is FinishReason.ABORT
        await before.aclose()
        again = request("same", [100 + turn], max_tokens=5)
        assert await collect(engine, again) == expected(again)
    await engine.check()


async def test_a_death_ends_the_wait_for_an_id():
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    before = engine.submit(request("same", [1], max_tokens=400))
    await anext(before)
    os.kill(engine.pid, signal.SIGSTOP)
    await before.aclose()
    again = request("same", [100], max_tokens=5)
    task = asyncio.create_task(collect(engine, again))
    await asyncio.sleep(0.05)
    os.kill(engine.pid, signal.SIGKILL)
    assert await asyncio.wait_for(task, 60) == expected(again)
    await engine.stop()


async def test_a_stop_ends_the_wait_for_an_id():
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    before = engine.submit(request("same", [1], max_tokens=400))
    await anext(before)
    os.kill(engine.pid, signal.SIGSTOP)
    await before.aclose()
    task = asyncio.create_task(collect(engine, request("same", [100], max_tokens=5)))
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(engine.stop())
    with pytest.raises(EngineDead):
        await asyncio.wait_for(task, 60)
    os.kill(engine.pid, signal.SIGCONT)
    await stopping


async def test_a_stop_ends_questions_that_the_engine_has_not_answered():
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    os.kill(engine.pid, signal.SIGSTOP)
    asked = [asyncio.create_task(question()) for question in (engine.stats, engine.look, engine.reset_prefix_cache)]
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(engine.stop())
    results = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
    os.kill(engine.pid, signal.SIGCONT)
    await stopping
    assert [type(result) for result in results] == [EngineDead] * 3


async def test_the_death_of_a_thread_ends_what_waits_for_it():
    engine = FakeEngine(**FAKE)
    await engine.start()
    before = engine.submit(request("same", [1], max_tokens=400))
    await anext(before)
    held = threading.Event()
    engine._commands.put(lambda core: held.wait(60) and 1 / 0)
    await before.aclose()
    again = asyncio.create_task(collect(engine, request("same", [100], max_tokens=5)))
    asked = asyncio.create_task(engine.stats())
    await asyncio.sleep(0)  # both wait for the thread
    held.set()
    results = await asyncio.wait_for(asyncio.gather(again, asked, return_exceptions=True), 60)
    assert [type(result) for result in results] == [EngineDead] * 2
    await engine.stop()


async def test_questions_beside_a_stop_end(engine):
    asked = [asyncio.create_task(engine.stats()) for _ in range(20)]
    await asyncio.sleep(0)
    await engine.stop()
    results = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
    assert all(isinstance(result, (EngineStats, EngineDead)) for result in results), results


async def test_a_killed_engine_resumes_every_stream():
    engine = ProcessEngine(fake={**FAKE, "step_seconds": 0.005})
    await engine.start()
    requests = [request(f"r{i}", [i], max_tokens=60, n=1 + i % 2, seed=i, temperature=1.0) for i in range(8)]
    tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
    await asyncio.sleep(0.15)
    os.kill(engine.pid, signal.SIGKILL)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert answers == [expected(r) for r in requests]
    assert engine.restarts == 1
    assert await collect(engine, request("next", [5])) == expected(request("next", [5]))
    await engine.check()
    await engine.stop()


async def recovered(engine, asked, new):
    """The answers to `asked`, whose engine is killed under them, and the answer to `new`, which comes right after."""
    begun: list[dict] = [{} for _ in asked]
    tasks = [asyncio.create_task(collect(engine, r, got)) for r, got in zip(asked, begun, strict=True)]
    await until(lambda: all(begun))
    os.kill(engine.pid, signal.SIGKILL)
    killed = asyncio.get_running_loop().time()
    answer = await asyncio.wait_for(collect(engine, new), 120)
    print(f"a new request was answered {asyncio.get_running_loop().time() - killed:.2f} s after the death")
    assert not any(task.done() for task in tasks), "it waited for nobody's end"
    return await asyncio.wait_for(asyncio.gather(*tasks), 120), answer


@pytest.mark.slow
async def test_24_streams_and_a_new_request_are_served_together_after_a_death():
    engine = ProcessEngine(fake={**FAKE, "max_rows": 32, "num_blocks": 900, "step_seconds": 0.01})
    await engine.start()
    asked, new = [request(f"r{i}", [i], max_tokens=150) for i in range(24)], request("new", [7], max_tokens=2)
    answers, answer = await recovered(engine, asked, new)
    assert answers == [expected(r) for r in asked] and answer == expected(new)
    assert engine.restarts == 1
    await engine.stop()


@pytest.mark.slow
async def test_the_bundled_model_gives_the_same_tokens_over_a_death():
    asked = [request(f"r{i}", range(5, 900 + i), max_tokens=60, temperature=1.0, seed=i) for i in range(24)]
    asked, new = [replace(r, params=replace(r.params, ignore_eos=True)) for r in asked], request("new", [7, 8])
    engine = ProcessEngine(EngineOptions("kvasir-mini", threads=1))
    await engine.start()
    plain = [await collect(engine, replace(r, no_cache=True)) for r in (*asked, new)]
    answers, answer = await recovered(engine, asked, new)
    assert [*answers, answer] == plain
    assert engine.restarts == 1
    await engine.check()
    await engine.stop()


@pytest.mark.few(1)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_to_end_is_left_to_the_parent(end):
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    asked = request("r", [1], max_tokens=100)
    task = asyncio.create_task(collect(engine, asked, got := {}))
    await until(lambda: got)
    os.kill(engine.pid, end)
    assert await asyncio.wait_for(task, 30) == expected(asked)
    assert engine.restarts == 0
    await engine.stop()


@pytest.mark.parametrize("how", ["deadly_token", pytest.param("device_fault_token", marks=pytest.mark.slow)])
async def test_a_poison_request_fails_once_and_affects_no_others(how):
    engine = ProcessEngine(fake={**FAKE, how: 255, "step_seconds": 0.002})
    await engine.start()
    requests = [request(f"r{i}", [i], max_tokens=40) for i in range(2)]
    requests = [r for r in requests if 255 not in expected(r)[0]]
    tasks = [asyncio.create_task(collect(engine, r)) for r in requests]
    await asyncio.sleep(0.02)
    with pytest.raises(EngineDead, match="twice"):
        await asyncio.wait_for(collect(engine, request("poison", [255, 1])), 30)
    assert await asyncio.wait_for(asyncio.gather(*tasks), 30) == [expected(r) for r in requests]
    await asyncio.wait_for(collect(engine, request("after", [9])), 30)
    assert 2 <= engine.restarts <= 8
    await engine.stop()


async def until(condition, seconds: float = 30.0) -> None:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to that")


async def test_a_request_sent_to_an_engine_that_was_dead_already_loses_no_life():
    engine = ProcessEngine(fake={**FAKE, "step_seconds": 0.01})
    await engine.start()
    os.kill(engine.pid, signal.SIGSTOP)
    asked = request("r", [1], max_tokens=40)
    task = asyncio.create_task(collect(engine, asked, got := {}))
    await asyncio.sleep(0.05)
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: got)
    os.kill(engine.pid, signal.SIGKILL)
    assert await asyncio.wait_for(task, 30) == expected(asked)
    assert engine.restarts == 2
    await engine.stop()


async def test_a_deadline_holds_without_an_engine(monkeypatch):
    monkeypatch.setattr("kvasir.engine.spawning.FREE_ATTEMPTS", 0)
    engine = ProcessEngine(fake=FAKE)
    await engine.start()
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.state.status == "restarting")
    late = replace(request("late", [1], n=2), deadline=0.05)
    reasons = [d.finish_reason async for d in engine.submit(late)]
    assert reasons == [FinishReason.TIMEOUT] * 2
    assert engine.state.status == "restarting", "it does not wait for the next engine"
    await until(lambda: engine.state.status == "ok")
    stats = await engine.stats()
    assert stats.running == stats.waiting == stats.finished == 0, "the next engine got it"
    await engine.stop()


async def test_a_stop_while_the_engine_starts_again_leaves_nothing():
    engine = ProcessEngine(fake={**FAKE, "step_seconds": 0.005})
    await engine.start()
    task = asyncio.create_task(collect(engine, request("r", [1], max_tokens=300)))
    await asyncio.sleep(0.05)
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.state.status != "ok")
    await engine.stop()
    with pytest.raises(EngineDead):
        await task
    assert not await engine.alive()


async def test_an_engine_that_does_not_start_raises_its_error():
    engine = ProcessEngine(EngineOptions(model="/no/such/model"), patient=True)
    with pytest.raises(KvasirError, match="/no/such/model"):
        await engine.start()
    assert not await engine.alive()


async def test_a_process_that_is_killed_before_it_reads_is_started_again(monkeypatch):
    start, killed = subprocess.Popen, []

    def popen(*args, **options):
        process = start(*args, **options)
        if not killed:
            process.kill()
            killed.append(process.wait())
        return process

    monkeypatch.setattr(spawning.subprocess, "Popen", popen)
    engine = ProcessEngine(fake=FAKE, patient=True)
    await engine.start()
    assert killed == [-signal.SIGKILL]
    asked = request("r", [1], max_tokens=5)
    assert await collect(engine, asked) == expected(asked)
    await engine.stop()


async def test_an_engine_whose_process_the_system_refuses_raises_its_error(monkeypatch):
    def popen(*args, **options):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(spawning.subprocess, "Popen", popen)
    with pytest.raises(EngineDead, match="temporarily unavailable"):
        await ProcessEngine(fake=FAKE).start()


async def test_a_launched_process_is_the_one_that_start_waits_for():
    engine = ProcessEngine(fake=FAKE)
    engine.launch()
    pid = engine.pid
    await asyncio.sleep(0.5)  # the process may connect before the parent binds the socket
    await engine.start()
    assert engine.pid == pid
    assert await collect(engine, asked := request("a", [1, 2], max_tokens=5)) == expected(asked)
    engine.abandon()  # has no effect on a started engine
    assert await engine.alive()
    await engine.stop()


async def test_a_process_that_is_interrupted_at_once_starts():
    engine = ProcessEngine(fake=FAKE)
    engine.launch()
    assert engine.pid
    os.kill(engine.pid, signal.SIGINT)  # as Ctrl-C on a terminal does, before it can ignore it
    await asyncio.sleep(0.1)
    os.kill(engine.pid, signal.SIGINT)
    await engine.start()
    assert await collect(engine, asked := request("a", [1, 2], max_tokens=5)) == expected(asked)
    await engine.stop()


def socket_folders() -> set[Path]:
    return set(socket_base().glob(f"kvasir-engine-{os.getpid()}-*"))


def test_an_abandoned_process_ends_and_leaves_no_files():
    before, engine = socket_folders(), ProcessEngine(fake=FAKE)
    engine.launch()
    assert socket_folders() > before
    engine.abandon()
    engine.abandon()
    assert socket_folders() == before
    assert not psutil.pid_exists(engine.pid)
