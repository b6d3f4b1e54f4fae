"""How many lines of batches run at once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import QueueFull
from kvasir.serve.records.batches import in_flight
from kvasir.serve.records.batches.in_flight import LEAST, MOST, InFlight, Places
from tests.serve.records.test_batches import CHAT, line, lines_of, serving, start, until
from tests.serve.running import make_front


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "cancel", "size"]), st.integers(0, 5)), max_size=40))
def test_places_hold_as_many_as_their_size_and_lose_none(steps):
    async def run() -> None:
        places, tasks = Places(2), []

        async def visit(end: asyncio.Event) -> None:
            async with places.one():
                await end.wait()

        for step, number in steps:
            before = places.taken
            if step == "enter":
                end = asyncio.Event()
                tasks.append((asyncio.ensure_future(visit(end)), end))
            elif step == "size":
                places.size = number
            elif tasks and step == "leave":
                tasks[number % len(tasks)][1].set()
            elif tasks:
                tasks.pop(number % len(tasks))[0].cancel()
            await _settled()
            assert places.taken <= max(before, places.size), "a smaller size ends nothing"
            inside = [task for task, end in tasks if not task.done()]
            assert places.taken == min(len(inside), max(places.size, places.taken))
        places.size = len(tasks) + 1
        for _, end in tasks:
            end.set()
        await asyncio.gather(*(task for task, _ in tasks))
        assert places.taken == 0

    asyncio.run(run())


async def test_those_that_came_first_enter_first():
    places, order = Places(1), []

    async def visit(name: int) -> None:
        async with places.one():
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*map(visit, range(6)))
    assert order == [*range(6)]


@pytest.mark.parametrize(("rows", "size"), [(0, LEAST), (8, LEAST), (64, 80), (100_000, MOST)])
async def test_the_number_follows_what_the_engines_compute(monkeypatch, rows, size):
    monkeypatch.setattr(in_flight, "LOOK_SECONDS", 0)
    asked = 0

    async def found() -> int:
        nonlocal asked
        asked += 1
        return rows

    flight = InFlight(None, found)
    async with flight.batch() as places:
        while asked < 2:
            await asyncio.sleep(0)
        assert (places.size, flight.all.size) == (size, size)
    assert flight._following is None


async def test_an_engine_that_does_not_answer_changes_nothing(monkeypatch):
    monkeypatch.setattr(in_flight, "LOOK_SECONDS", 0)
    asked = 0

    async def fails() -> int:
        nonlocal asked
        asked += 1
        raise OSError("no answer")

    flight = InFlight(None, fails)
    async with flight.batch() as places:
        while asked < 3:
            await asyncio.sleep(0)
        assert places.size == LEAST


async def test_metrics_count_outcomes_from_the_start():
    async with serving() as http:
        text = (await http.get("/metrics")).text
        for outcome in ("completed", "failed", "retried"):
            assert f'kvasir_batch_lines_total{{outcome="{outcome}"}} 0.0' in text


async def test_metrics_count_batches_and_lines():
    front, refused = make_front(), []
    submit = front.engine.submit

    async def full_at_first(request):
        if not refused:
            refused.append(request.id)
            raise QueueFull("the queue is full")
        async for delta in submit(request):
            yield delta

    front.engine.submit = full_at_first
    async with serving(front=front, batch_width=24) as http:
        tasks = [line(f"c{i}", max_tokens=3) for i in range(30)]
        tasks[3] = {"custom_id": "bad", "method": "POST", "url": CHAT, "body": {"model": "nobody", "messages": []}}
        batch = await until(http, await start(http, tasks), "completed")
        assert len(await lines_of(http, batch["output_file_id"])) == 29
        text = (await http.get("/metrics")).text
        found = dict(one.rsplit(" ", 1) for one in text.splitlines() if one.startswith("kvasir_batch"))
        assert float(found['kvasir_batch_lines_total{outcome="completed"}']) == 29
        assert float(found['kvasir_batch_lines_total{outcome="failed"}']) == 1
        assert float(found['kvasir_batch_lines_total{outcome="retried"}']) == 1
        assert (float(found["kvasir_batch_lines_running"]), float(found["kvasir_batch_lines_max"])) == (0, 24)
