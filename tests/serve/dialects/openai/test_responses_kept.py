"""Stored responses: continued conversations, access by key, background responses, restarts."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvasir.serve.auth.keys import Key
from kvasir.serve.settings import ServeSettings
from tests.later import openai
from tests.serve.dialects.openai.responses_help import TOOLS, body, create, keeping, refused, reported, same
from tests.serve.fakes import POISON
from tests.serve.http.test_streams import wait_until
from tests.serve.running import assert_idle, live, make_front

ANN, BOB = Key("ann-secret", "ann"), Key("bob-secret", "bob")
AS_ANN, AS_BOB = ({"Authorization": f"Bearer {key.secret}"} for key in (ANN, BOB))
SLOW = {"step_seconds": 0.005, "max_model_len": 4000}


async def status(http, id: str) -> str:
    return (await http.get(f"/v1/responses/{id}")).json().get("status", "")


async def until(http, id: str, *wanted: str) -> dict:
    async with asyncio.timeout(20):
        while await status(http, id) not in wanted:
            await asyncio.sleep(0.01)
    return (await http.get(f"/v1/responses/{id}")).json()


# -- conversations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
async def test_a_conversation_that_is_kept_is_the_one_given_in_full(tmp_path, on_disk):
    """In every way to continue: by the response's id, by its items, by references to them."""
    asked = {"temperature": 0, "max_output_tokens": 20}
    async with keeping(tmp_path / "data" if on_disk else None, front=make_front()) as http:
        first = await create(http, input="one", instructions="Shout.", **asked)
        second = await create(http, input="two", previous_response_id=first["id"], **asked)
        by_id = await create(http, input="three", previous_response_id=second["id"], instructions="New.", **asked)
        items = [
            {"role": "user", "content": "one"},
            *first["output"],
            {"role": "user", "content": "two"},
            *({"type": "item_reference", "id": item["id"]} for item in second["output"]),
            {"role": "user", "content": "three"},
        ]
        in_full = await create(http, input=items, instructions="New.", **asked)
        drop = {"previous_response_id"}
        assert {k: v for k, v in same(by_id).items() if k not in drop} == {
            k: v for k, v in same(in_full).items() if k not in drop
        }
        listed = (await http.get(f"/v1/responses/{in_full['id']}/input_items?order=asc")).json()["data"]
        assert [item["content"][0]["text"] for item in listed] == [
            item["content"][0]["text"] if isinstance(item.get("content"), list) else item["content"]
            for item in [items[0], *first["output"], items[2], *second["output"], items[-1]]
        ]
        assert listed[3]["id"] == second["output"][0]["id"]


async def test_calls_continue_with_their_outputs():
    async with keeping() as http:
        first = await create(http, **body(tools=TOOLS))
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": c["call_id"], "output": "ok<eos>"} for c in calls]
        second = await create(http, **body(input=outputs, previous_response_id=first["id"], tools=TOOLS))
        assert second["output"][0]["content"][0]["text"] == "ok"
        error = await refused(http, **body(input=outputs, tools=TOOLS))
        assert error["param"] == "input.0.call_id"
        twice = [*calls, *outputs]
        error = await refused(http, **body(input=twice, previous_response_id=first["id"]))
        assert error["param"] == "input.0.id" and "twice" in error["message"]


async def test_a_response_that_was_not_stored_is_not_found():
    async with keeping() as http:
        response = await create(http, **body("x", store=False))
        assert response["store"] is False
        path = f"/v1/responses/{response['id']}"
        assert (await refused(http, "GET", path, status=404))["code"] == "not_found"
        error = await refused(http, status=404, **body("y", previous_response_id=response["id"]))
        assert error["param"] == "previous_response_id"
        for bad in ("resp_x", "..%2f..%2fetc", "x" * 300, f"resp_{0:048x}", "input_tokens"):
            await refused(http, "GET", f"/v1/responses/{bad}", status=404)
        await refused(http, status=400, **body("y", previous_response_id="x" * 65))


async def test_a_deleted_response_is_gone_and_breaks_its_conversation():
    async with keeping() as http:
        first = await create(http, **body("x"))
        second = await create(http, **body("y", previous_response_id=first["id"]))
        deleted = await http.delete(f"/v1/responses/{first['id']}")
        assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
        await refused(http, "DELETE", f"/v1/responses/{first['id']}", status=404)
        await refused(http, status=404, **body("z", previous_response_id=second["id"]))
        assert await status(http, second["id"]) == "completed"


async def test_items_come_in_pages():
    async with keeping() as http:
        items = [{"role": "user", "content": str(i)} for i in range(7)]
        response = await create(http, **body(input=items, max_output_tokens=1))
        path = f"/v1/responses/{response['id']}/input_items"
        for order, expected in (("asc", "0123456"), ("desc", "6543210")):
            seen, after = [], ""
            while True:
                page = (await http.get(f"{path}?limit=3&order={order}{after}")).json()
                seen += page["data"]
                assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
                if not page["has_more"]:
                    break
                after = f"&after={page['last_id']}"
            assert "".join(item["content"][0]["text"] for item in seen) == expected
        assert (await http.get(path)).json()["data"][0]["content"][0]["text"] == "6"
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nobody", "before=x", "include[]=x"):
            assert (await refused(http, "GET", f"{path}?{query}"))["param"].split(".")[0] in query
        end = (await http.get(f"{path}?after={seen[-1]['id']}")).json()
        assert end == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


# -- whose they are, and how many ----------------------------------------------------------------------------


async def test_a_key_sees_its_own_alone():
    async with keeping(keys=(ANN, BOB)) as http:
        asked = body("x", background=True)
        response = (await http.post("/v1/responses", json=asked, headers=AS_ANN)).json()
        path = f"/v1/responses/{response['id']}"
        item = f"msg_{response['id'].removeprefix('resp_')}00000"
        for method, place in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
            answer = await http.request(method, path + place, headers=AS_BOB)
            assert answer.status_code == 404
            assert response["id"] in answer.json()["error"]["message"]
        for fields in ({"previous_response_id": response["id"]}, {"input": [{"type": "item_reference", "id": item}]}):
            answer = await http.post("/v1/responses", json=body("y") | fields, headers=AS_BOB)
            assert answer.status_code in (400, 404)
        assert (await http.get(path, headers=AS_ANN)).status_code == 200
        assert (await http.post("/v1/responses", json=body(**{"input": [{"id": item}]}), headers=AS_ANN)).is_success


async def test_the_longest_unused_leave_when_a_key_has_too_many():
    async with keeping(stored_count=3) as http:
        ids = [(await create(http, **body(str(i))))["id"] for i in range(3)]
        await status(http, ids[0])
        ids.append((await create(http, **body("x")))["id"])
        found = [(await http.get(f"/v1/responses/{id}")).status_code for id in ids]
        assert found == [200, 404, 200, 200]


async def test_a_response_that_cannot_be_stored_is_an_error(tmp_path):
    async with keeping(stored_bytes=600) as http:
        assert (await create(http, **body("x" * 100)))["store"] is False
        assert (await refused(http, status=429, **body("x" * 100, background=True)))["message"]
    async with keeping(tmp_path / "data") as http:
        (tmp_path / "data" / "responses").chmod(0o755)
        await create(http, **body("x"))
        for place in (tmp_path / "data" / "responses").glob("nobody-*"):
            place.chmod(0o755)
        assert (await create(http, **body("x")))["store"] is False
        assert (await refused(http, status=500, **body("x", background=True)))["code"] == "engine_error"


async def test_many_references_to_a_response_read_it_once(monkeypatch):
    async with keeping(front=make_front()) as http:
        reply = [{"role": "user", "content": str(i)} for i in range(20)]
        id = (await create(http, input=reply, max_output_tokens=2))["id"]
        items = (await http.get(f"/v1/responses/{id}/input_items?order=asc&limit=20")).json()["data"]
        records, read = http.app.state.responses.records, []
        get = records.get
        monkeypatch.setattr(records, "get", lambda owner, id: read.append(id) or get(owner, id))
        again = [{"type": "item_reference", "id": item["id"]} for item in items]
        answer = await create(http, input=again, max_output_tokens=2)
        assert read == [id]
        kept = (await http.get(f"/v1/responses/{answer['id']}/input_items?order=asc&limit=20")).json()["data"]
        assert [item["content"] for item in kept] == [item["content"] for item in items]


async def test_the_history_of_a_request_is_bounded_like_its_body():
    async with keeping(max_body=4000, front=make_front(max_model_len=9000, num_blocks=900)) as http:
        ids, last = [], None
        for _ in range(20):
            asked = {"input": "x" * 400, "max_output_tokens": 2}
            answer = await http.post("/v1/responses", json=asked | ({"previous_response_id": last} if last else {}))
            if answer.status_code != 200:
                break
            last = answer.json()["id"]
            ids.append(last)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "previous_response_id")
        assert "4000 bytes" in error["message"]
        assert 4 <= len(ids) <= 8
        counted = await http.post("/v1/responses/input_tokens", json={"input": "x", "previous_response_id": last})
        assert counted.json()["error"]["param"] == "previous_response_id"
        referred = []
        for id in ids:
            (item,) = (await http.get(f"/v1/responses/{id}/input_items")).json()["data"]
            referred.append({"type": "item_reference", "id": item["id"]})
        again = {"input": referred[:3], "max_output_tokens": 2}
        assert (await http.post("/v1/responses", json=again)).status_code == 200
        over = await http.post("/v1/responses", json=again | {"input": referred})
        assert over.status_code == 400 and over.json()["error"]["param"].startswith("input.")
        assert (await http.get(f"/v1/responses/{ids[0]}")).status_code == 200, "it is kept all the same"


# -- in the background ---------------------------------------------------------------------------------------


async def test_a_background_response_needs_no_connection():
    async with keeping() as http:
        started = await create(http, **body(background=True, tools=TOOLS))
        assert started["status"] == "queued" and started["output"] == [] and started["background"]
        done = await until(http, started["id"], "completed")
        assert same(done) == same(await create(http, **body(tools=TOOLS)))
        again = await http.post(f"/v1/responses/{started['id']}/cancel")
        assert again.json() == done, "what has ended stays as it is"


async def test_a_stream_is_resumed_after_a_sequence_number():
    async with keeping(front=make_front(**SLOW)) as http:
        asked = {"input": "hello", "temperature": 0, "max_output_tokens": 60, "background": True, "stream": True}
        text = (await http.post("/v1/responses", json=asked)).text
        id = reported(text)[0]["response"]["id"]
        for after in (0, random.randrange(1, 60), 60, 10_000):
            rest = (await http.get(f"/v1/responses/{id}?stream=true&starting_after={after}")).text
            assert rest == "".join(b + "\n\n" for b in text.split("\n\n")[after + 1 : -1])
        assert (await http.get(f"/v1/responses/{id}?stream=true")).text == text
        plain = await create(http, input="x", max_output_tokens=1)
        assert (await refused(http, "GET", f"/v1/responses/{plain['id']}?stream=true"))["param"] == "stream"
        assert (await refused(http, "GET", f"/v1/responses/{id}?starting_after=3"))["param"] == "starting_after"


def test_a_reader_that_leaves_does_not_end_it_and_others_read_it_as_it_comes():
    with live(**SLOW) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = api.responses.create(
            model="fake", input="hello", max_output_tokens=200, temperature=0, background=True, stream=True
        )
        seen = [next(stream) for _ in range(20)]
        id = seen[0].response.id
        stream.close()
        assert api.responses.retrieve(id).status == "in_progress"
        seen += api.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        reply = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
        assert reply == seen[-1].response.output_text == api.responses.retrieve(id).output_text and len(reply) == 200


async def test_a_cancelled_response_ends_and_keeps_its_text():
    front = make_front(**SLOW)
    async with keeping(front=front) as http:
        asked = {"input": "hello", "temperature": 0, "max_output_tokens": 3000, "background": True}
        id = (await create(http, **asked))["id"]
        await until(http, id, "in_progress")
        async with asyncio.timeout(10):
            while not front.meter.open_requests:
                await asyncio.sleep(0.01)
        cancelled = (await http.post(f"/v1/responses/{id}/cancel")).json()
        assert cancelled["status"] == "cancelled" and cancelled["completed_at"] is None
        await assert_idle(front)
        assert (await http.get(f"/v1/responses/{id}")).json() == cancelled
        assert (await http.post(f"/v1/responses/{id}/cancel")).json() == cancelled
        assert {item["status"] for item in cancelled["output"]} <= {"incomplete"}

        id = (await create(http, **asked))["id"]
        assert (await http.delete(f"/v1/responses/{id}")).json()["deleted"]
        await assert_idle(front)
        await refused(http, "GET", f"/v1/responses/{id}", status=404)

        plain = await create(http, input="x", max_output_tokens=1)
        assert "background" in (await refused(http, "POST", f"/v1/responses/{plain['id']}/cancel"))["message"]


async def test_a_cancelled_stream_ends_with_an_error():
    async with keeping(front=make_front(**SLOW)) as http:
        asked = {"input": "hello", "max_output_tokens": 3000, "background": True, "stream": True}
        reading = asyncio.ensure_future(http.post("/v1/responses", json=asked))
        running = http.app.state.responses.running
        async with asyncio.timeout(10):
            while not running:
                await asyncio.sleep(0.01)
        (id,) = running
        await until(http, id, "in_progress")
        await http.post(f"/v1/responses/{id}/cancel")
        events = reported((await reading).text)
        assert (events[-1]["type"], events[-1]["code"]) == ("error", "cancelled")


@pytest.mark.parametrize(("most", "stored_bytes"), [(2, 1 << 20), (99, 2 * 2 * 5000)])
async def test_events_are_kept_by_key_few_and_small(monkeypatch, most, stored_bytes):
    monkeypatch.setattr("kvasir.serve.records.responses.MAX_ENDED", most)

    async def make(http, key) -> str:
        asked = {
            "input": "hello",
            "max_output_tokens": 5,
            "background": True,
            "stream": True,
            "instructions": "x" * 400,
        }
        answer = await http.post("/v1/responses", json=asked, headers={"Authorization": f"Bearer {key.secret}"})
        return reported(answer.text)[-1]["response"]["id"]

    async with keeping(keys=(ANN, BOB), stored_bytes=stored_bytes, front=make_front(max_model_len=1000)) as http:
        own = await make(http, BOB)
        ids = [await make(http, ANN) for _ in range(6)]
        found = [(await http.get(f"/v1/responses/{id}?stream=true", headers=AS_ANN)).status_code for id in ids]
        assert found == sorted(found, reverse=True) and found[-1] == 200 and found.count(200) <= 2
        assert (await http.get(f"/v1/responses/{own}?stream=true", headers=AS_BOB)).status_code == 200


async def test_a_key_has_a_bound_on_what_runs_in_the_background():
    async with keeping(keys=(ANN, BOB), max_background=2, front=make_front(**SLOW)) as http:
        asked = {"input": "hello", "max_output_tokens": 3000, "background": True}
        ids = [(await http.post("/v1/responses", json=asked, headers=AS_ANN)).json()["id"] for _ in range(2)]
        over = await http.post("/v1/responses", json=asked, headers=AS_ANN)
        assert over.status_code == 429 and over.headers["retry-after"]
        other = await http.post("/v1/responses", json=asked, headers=AS_BOB)
        assert other.status_code == 200
        error = (await http.post("/v1/responses", json=body("x", previous_response_id=ids[0]), headers=AS_ANN)).json()
        assert error["error"]["param"] == "previous_response_id"
        for id, key in ((ids[0], AS_ANN), (ids[1], AS_ANN), (other.json()["id"], AS_BOB)):
            await http.post(f"/v1/responses/{id}/cancel", headers=key)
        assert (await http.post("/v1/responses", json=body("x"), headers=AS_ANN)).status_code == 200


# -- restarts and failures -----------------------------------------------------------------------------------


async def test_stored_responses_survive_a_restart(tmp_path):
    async with keeping(tmp_path / "data") as http:
        first = await create(http, **body("x"))
    async with keeping(tmp_path / "data") as http:
        assert (await http.get(f"/v1/responses/{first['id']}")).json() == first
        await create(http, **body("y", previous_response_id=first["id"]))


async def test_a_response_that_was_incomplete_at_shutdown_has_failed(tmp_path):
    front = make_front(**SLOW)
    async with keeping(tmp_path / "data", front=front) as http:
        id = (await create(http, input="hello", max_output_tokens=3000, background=True))["id"]
        (path,) = (tmp_path / "data").rglob("*.json")
        unfinished = path.read_bytes()
        await http.post(f"/v1/responses/{id}/cancel")
    path.write_bytes(unfinished)
    async with keeping(tmp_path / "data") as http:
        response = (await http.get(f"/v1/responses/{id}")).json()
        assert response["status"] == "failed" and "server" in response["error"]["message"]
        assert (await http.post(f"/v1/responses/{id}/cancel")).json() == response


async def test_a_failing_engine_is_reported_without_internals():
    async with keeping() as http:
        asked = {"input": POISON, "max_output_tokens": 5}
        error = await refused(http, status=500, **asked)
        assert error["code"] == "engine_error" and "Secret" not in str(error)
        assert (await refused(http, status=500, **asked, stream=True))["code"] == "engine_error"
        id = (await create(http, **asked, background=True))["id"]
        failed = await until(http, id, "failed")
        assert failed["error"]["code"] == "server_error" and "Secret" not in str(failed)
        events = reported((await http.post("/v1/responses", json={**asked, "background": True, "stream": True})).text)
        assert events[-1]["type"] == "response.failed" and events[-1]["response"]["error"] == failed["error"] | {
            "message": events[-1]["response"]["error"]["message"]
        }


async def test_a_deadline_in_mid_answer_fails_with_the_text_so_far():
    async with keeping(front=make_front(**SLOW)) as http:
        asked = {"input": "hello", "max_output_tokens": 3000, "deadline": 0.5, "stream": True}
        events = reported((await http.post("/v1/responses", json=asked)).text)
        response = events[-1]["response"]
        assert (events[-1]["type"], response["status"]) == ("response.failed", "failed")
        assert "deadline" in response["error"]["message"]
        reply = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
        assert reply == response["output"][0]["content"][0]["text"] and response["output"][0]["status"] == "incomplete"


# -- OpenAI's own client -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url():
    with live(ServeSettings(port=0)) as server:
        yield f"{server.url}/v1"


def test_every_route_by_the_client(url):
    api = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    first = api.responses.create(model="fake", input="hello", max_output_tokens=20, temperature=0)
    assert first.status == "incomplete" and first.output_text == "user: hello\nassistan"
    with api.responses.stream(model="fake", input="hello", max_output_tokens=20, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert kinds[-1] == "response.incomplete"
    assert api.responses.retrieve(first.id).output_text == first.output_text
    assert [item.content[0].text for item in api.responses.input_items.list(first.id)] == ["hello"]
    assert api.responses.input_tokens.count(model="fake", input="hello").input_tokens == first.usage.input_tokens
    running = api.responses.create(model="fake", input="x", max_output_tokens=2, background=True)
    wait_until(lambda: api.responses.retrieve(running.id).status == "incomplete")
    assert api.responses.cancel(running.id).status == "incomplete"
    api.responses.delete(first.id)
    for wrong, error in (
        (lambda: api.responses.retrieve(first.id), openai.NotFoundError),
        (lambda: api.responses.create(model="fake", input="x", conversation="c"), openai.BadRequestError),
        (lambda: api.responses.create(model="other", input="x"), openai.NotFoundError),
    ):
        with pytest.raises(error):
            wrong()


async def test_the_same_by_the_asynchronous_client(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as api:
        asked = {"model": "fake", "input": "hello<eos>", "max_output_tokens": 40, "temperature": 0}
        asked["extra_body"] = {"trust_special_tokens": True}
        whole = await api.responses.create(**asked)
        async with api.responses.stream(**asked) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text and final.usage.output_tokens == whole.usage.output_tokens
        assert [i.id async for i in api.responses.input_items.list(final.id)]
        await api.responses.delete(final.id)
