"""Grammars of the text half: a server is ready for them at startup, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import psutil
import pytest

from kvasir.engine import grammars as module
from kvasir.engine import wire
from kvasir.engine.front import Front
from kvasir.engine.grammars import Grammars
from kvasir.engine.reading import Calling, Reading
from kvasir.engine.worker import EngineWorker
from kvasir.errors import InvalidRequest, QueueFull
from kvasir.guided.check import SCRIPT
from kvasir.guided.vocabulary import Vocabulary
from kvasir.parse.table import choose
from kvasir.types import SamplingParams, StructuredOutputs, Task
from tests.serve.fakes import VOCAB, EchoEngine, byte_tokenizer, template


async def until(fact: Callable[[], bool]) -> None:
    for _ in range(6000):
        if fact():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be")


async def started(**engine) -> Front:
    front = Front(EchoEngine(**engine), byte_tokenizer(), template(), warm=True)
    await front.start()
    return front


def processes() -> set[int]:
    """The processes of this one that check grammars."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if str(SCRIPT) in child.cmdline():
                found.add(child.pid)
    return found


def warming() -> bool:
    return any("grammar-warm" in thread.name for thread in threading.enumerate())


@pytest.fixture
def others() -> set[int]:
    return processes()


async def test_a_server_is_ready_for_grammars_before_one_comes(others):
    front = await started()
    await until(lambda: not warming())
    ready = processes() - others
    assert len(ready) == 1
    assert await front.grammars.later(front.grammars.of, StructuredOutputs(choice=("a", "b")))
    assert processes() - others == ready, "the first grammar started another"
    await front.stop()
    await until(lambda: processes() <= others)


async def test_a_model_that_is_unloaded_at_once_keeps_no_process(others):
    front = await started()
    await front.stop()
    await until(lambda: not warming())
    assert processes() <= others


async def test_a_model_that_answers_no_text_starts_no_grammar_process(others):
    front = await started(tasks=(Task.EMBED,))
    assert not warming() and processes() <= others
    await front.stop()


async def test_a_tokenizer_that_does_not_support_grammars_is_reported_with_the_first_grammar():
    grammars = Grammars(lambda: Vocabulary(byte_tokenizer(), VOCAB - 1))
    grammars.warm()
    with pytest.raises(InvalidRequest, match=r"tokenizer.*grammars"):
        await grammars.later(grammars.of, StructuredOutputs(choice=("a",)))


@pytest.mark.parametrize("count", [1, 100])
def test_tools_whose_parameters_are_no_object_are_refused_and_others_are_loosened(count):
    grammars = Grammars(lambda: Vocabulary(byte_tokenizer(), VOCAB))
    reading = Reading(choose(tools="hermes"), {}, False, True, frozenset())
    odd = {"type": "object", "properties": {"x": {"$ref": "#/no"}}}
    fine = Calling([(f"f{i}", odd, False) for i in range(count)], True, True)
    rule = grammars.answer(reading, SamplingParams(), fine)
    assert rule and "#/no" not in rule
    bad = Calling([*fine.functions, ("g", {"type": "string"}, False)], True, True)
    with pytest.raises(InvalidRequest, match=r"'g'.*string") as caught:
        grammars.answer(reading, SamplingParams(), bad)
    assert caught.value.param == "tools"
    grammars.close()


async def test_the_number_of_grammars_checked_at_once_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_ASKING", 3)
    grammars, begun = Grammars(lambda: Vocabulary(byte_tokenizer(), VOCAB)), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow() -> None:
        asyncio.run_coroutine_threadsafe(begun.wait(), loop).result()

    asking = [asyncio.create_task(grammars.later(slow)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="grammars"):
        await grammars.later(slow)
    begun.set()
    await asyncio.gather(*asking)
    assert await grammars.later(lambda: 1) == 1


class Socket:
    """Of an engine that is asked for its pulse twice and then to stop. waits: how long it waits for each command, in
    milliseconds."""

    def __init__(self):
        self.waits: list[int | None] = []
        self.commands = [wire.EngineQuery(1, "pulse"), wire.EngineQuery(2, "pulse"), wire.Stop()]

    def poll(self, timeout: int | None = None) -> int:
        self.waits.append(timeout)
        return timeout is None

    def recv(self) -> bytes:
        return wire.encode(self.commands.pop(0))

    def send(self, data: bytes) -> None:
        """Its replies."""


class Core:
    warmed, longest_step = 0, 0.0

    def warm(self) -> None:
        self.warmed += 1

    def has_work(self) -> bool:
        return False

    def expires(self) -> None:
        """No request has a deadline."""

    def rest(self) -> None:
        """Nothing leaked."""

    def close(self) -> None:
        """Nothing is left."""


def test_an_engine_gets_ready_once_when_it_has_been_quiet():
    socket, core = Socket(), Core()
    worker = EngineWorker(socket, core)  # type: ignore[arg-type]
    worker.run()
    assert core.warmed == 1 and socket.waits[1:] == [None, None, None]
    assert socket.waits[0] and socket.waits[0] > 0, "first it waits for some work"
