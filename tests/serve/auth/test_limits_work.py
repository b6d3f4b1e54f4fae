"""The bound on what a key has under way at once, on work that no connection waits for: responses in the background and
the lines of batches."""

from __future__ import annotations

import asyncio

import pytest

from kvasir.serve.auth.keys import Key, KeyLimits
from kvasir.serve.auth.quota import Account
from kvasir.serve.records.batches.call import Caller
from tests.serve.records.test_batches import line, lines_of, serving, start, until
from tests.serve.running import make_front

ANN = Key("ann-secret", "ann", limits=KeyLimits(concurrent=2))
BOB = Key("bob-secret", "bob")
AS_ANN, AS_BOB = ({"Authorization": f"Bearer {key.secret}"} for key in (ANN, BOB))
SLOW = {"step_seconds": 0.002, "max_model_len": 4000}
HELLO = {"input": "hello", "max_output_tokens": 3000, "background": True}


async def ask(http, headers=AS_ANN) -> int:
    return (await http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2}, headers=headers)).status_code


@pytest.mark.parametrize("stream", [False, True])
async def test_a_background_response_counts_until_it_ends(stream):
    async with serving(front=make_front(**SLOW), keys=(ANN, BOB)) as http:

        async def begin() -> str:
            runs = http.app.state.responses.running
            before = set(runs)
            asking = asyncio.ensure_future(http.post("/v1/responses", json=HELLO | {"stream": stream}, headers=AS_ANN))
            async with asyncio.timeout(10):
                while not (new := set(runs) - before) or runs[min(new)].status != "in_progress":
                    await asyncio.sleep(0.005)
            if stream:  # the reader disconnects, the response continues
                asking.cancel()
            await asyncio.wait((asking,))
            return new.pop()

        first = await begin()
        assert await ask(http) == 200
        second = await begin()
        over = await http.post("/v1/responses", json=HELLO, headers=AS_ANN)
        assert over.status_code == 429 and "2 requests of this key are open" in over.json()["error"]["message"]
        assert await ask(http) == 429 and await ask(http, AS_BOB) == 200
        assert (await http.get(f"/v1/responses/{first}", headers=AS_ANN)).status_code == 200, "to look is free"
        assert (await http.post(f"/v1/responses/{first}/cancel", headers=AS_ANN)).status_code == 200, "as is to end"
        assert await ask(http) == 200
        await http.app.state.responses.running[second].cancel()
        await asyncio.sleep(0)
        account = http.app.state.catalogue.quotas.accounts["ann"]
        assert account.num_open == 0


async def test_batch_lines_use_spare_capacity_and_never_delay_requests(monkeypatch):
    front = make_front(step_seconds=0.002)
    async with serving(front=front, keys=(ANN, BOB), batch_width=16) as http:
        account = http.app.state.catalogue.quotas.accounts["ann"]
        running, seen = {"ann": 0, "bob": 0}, {"ann": [], "bob": []}
        post = Caller.post

        async def counted(self, path, body, key, id):
            running[key.name] += 1
            seen[key.name].append((running[key.name], account.num_open))
            try:
                return await post(self, path, body, key, id)
            finally:
                running[key.name] -= 1

        monkeypatch.setattr(Caller, "post", counted)
        tasks = [line(f"c{i}", max_tokens=20) for i in range(12)]
        batch = await start(http, tasks, headers=AS_ANN)
        other = await start(http, tasks, headers=AS_BOB)
        while not running["ann"]:
            await asyncio.sleep(0)
        for _ in range(5):
            assert await ask(http) == 200, "with a batch under way"
        batch = await until(http, batch, "completed", headers=AS_ANN)
        assert len(await lines_of(http, batch["output_file_id"], AS_ANN)) == 12
        await until(http, other, "completed", headers=AS_BOB)
        assert all(lines + requests <= 2 for lines, requests in seen["ann"]), "as each line begins"
        assert max(seen["ann"])[0] == 2 < max(seen["bob"])[0]
        assert (account.num_open, account.num_lines) == (0, 0)


async def test_a_batch_line_waits_for_a_free_slot_or_a_higher_limit():
    def key(most: int | None) -> Key:
        return Key("ann-secret", "ann", limits=KeyLimits(concurrent=most))

    account = Account(key(1), lambda: 0)
    place, began = account.open(), []

    async def run(number: int) -> None:
        async with account.line():
            began.append(number)
            await asyncio.sleep(60)

    tasks = [asyncio.ensure_future(run(i)) for i in range(3)]

    async def settle() -> int:
        for _ in range(10):
            await asyncio.sleep(0)
        return len(began)

    assert await settle() == 0
    place.leave()
    assert await settle() == 1
    tasks[began[0]].cancel()
    assert await settle() == 2, "who leaves makes room"
    account.limit(KeyLimits(concurrent=5))
    assert await settle() == 3
    account.limit(KeyLimits(concurrent=None))
    async with account.line():
        pass
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (account.num_open, account.num_lines) == (0, 0)


@pytest.mark.parametrize("dialect", ["batches/batch_", "messages/batches/msgbatch_"])
async def test_a_batch_that_waits_for_the_limit_of_its_key_can_be_cancelled(dialect):
    key = Key("ann-secret", "ann", limits=KeyLimits(concurrent=1))
    async with serving(front=make_front(**SLOW), keys=(key,)) as http:
        tasks = [line(f"c{i}", "/v1/messages", max_tokens=20) for i in range(3)]
        batch = await start(http, tasks, "/v1/messages", headers=AS_ANN)
        place = http.app.state.catalogue.quotas.accounts["ann"].open()
        assert await ask(http) == 429
        path = f"/v1/{dialect}{batch['id'].removeprefix('batch_')}/cancel"
        assert (await http.post(path, headers=AS_ANN)).status_code == 200
        batch = await until(http, batch, "cancelled", headers=AS_ANN)
        assert batch["request_counts"]["completed"] < 3
        place.leave()
