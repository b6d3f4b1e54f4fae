"""Message batches by Anthropic's own client: made, listed, read, cancelled, deleted."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import httpx
import pytest

from kvasir.serve.auth.keys import Key
from kvasir.serve.dialects.anthropic.batches import failed_results, results
from kvasir.serve.settings import ServeSettings
from tests.later import anthropic, openai
from tests.serve.records.test_batches import ANN, AS_ANN, BOB
from tests.serve.running import live, make_front

DONE = {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}


def client_of(server, key: Key | None = None) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key.secret if key else "none", max_retries=0)


def asked(id: str, reply: str = "", **fields) -> dict:
    params = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": reply or id}]}
    return {"custom_id": id, "params": params | fields}


def ended(own: anthropic.Anthropic, id: str, seconds: float = 20.0):
    until = time.monotonic() + seconds
    while (batch := own.messages.batches.retrieve(id)).processing_status != "ended":
        assert time.monotonic() < until, batch
        time.sleep(0.02)
    return batch


@pytest.fixture(scope="module")
def server():
    with live(ServeSettings(port=0, keys=(ANN, BOB)), make_front(max_model_len=2048, num_blocks=2000)) as server:
        yield server


@pytest.fixture
def own(server):
    with client_of(server, ANN) as own:
        yield own
        for batch in own.messages.batches.list():
            with suppress(anthropic.BadRequestError):  # it has ended
                own.messages.batches.cancel(batch.id)
            ended(own, batch.id)
            own.messages.batches.delete(batch.id)
        # the files go with their batches
        assert httpx.get(f"{server.url}/v1/files", headers=AS_ANN).json()["data"] == []


def test_each_request_has_its_result(own):
    requests = [asked("a"), asked("b", temperature=-1), asked("c", max_tokens="x"), asked("d", "y" * 3000)]
    batch = own.messages.batches.create(requests=requests)
    assert batch.type == "message_batch" and batch.id.startswith("msgbatch_")
    assert batch.processing_status == "in_progress" and batch.results_url is None and batch.ended_at is None
    assert batch.request_counts.to_dict() == DONE | {"processing": 4}
    batch = ended(own, batch.id)
    assert batch.request_counts.to_dict() == DONE | {"succeeded": 1, "errored": 3}
    assert batch.ended_at is not None and batch.created_at <= batch.ended_at < batch.expires_at
    results = {line.custom_id: line.result for line in own.messages.batches.results(batch.id)}
    assert set(results) == set("abcd")
    alone = own.messages.create(**asked("a")["params"], extra_body={"seed": results["a"].message.seed})
    assert results["a"].message.content[0].text == alone.content[0].text
    assert results["a"].message.usage.service_tier == "batch"
    kinds = {id: results[id].error.error.type for id in "bcd"}
    assert set(kinds.values()) == {"invalid_request_error"}
    assert results["b"].error.request_id and "temperature" in results["b"].error.error.message


def test_the_beta_client_speaks_the_same(own):
    batch = own.beta.messages.batches.create(requests=[asked("a")], betas=["message-batches-2024-09-24"])
    ended(own, batch.id)
    [line] = own.beta.messages.batches.results(batch.id)
    assert line.result.type == "succeeded" and line.result.message.content


def test_batches_are_listed_in_pages_newest_first(own):
    ids = [own.messages.batches.create(requests=[asked("a")]).id for _ in range(3)]
    listed = own.messages.batches.list(limit=2)
    assert {batch.id for batch in own.messages.batches.list(limit=2)} == set(ids)
    assert len(listed.data) == 2 and listed.has_more and listed.last_id == listed.data[-1].id
    before = own.messages.batches.list(limit=5, before_id=listed.data[1].id)
    assert [batch.id for batch in before.data] == [listed.data[0].id] and not before.has_more
    for wrong in ({"limit": 0}, {"after_id": "msgbatch_0"}, {"after_id": ids[0], "before_id": "msgbatch_0"}):
        with pytest.raises(anthropic.BadRequestError):
            own.messages.batches.list(**wrong)


def test_a_cancelled_batch_reports_the_requests_that_did_not_run(own):
    requests = [asked(f"c{i}", "x" * 50, max_tokens=1900) for i in range(12)]
    batch = own.messages.batches.create(requests=requests)
    with pytest.raises(anthropic.BadRequestError, match="in_progress"):
        own.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.AnthropicError, match="results_url"):
        own.messages.batches.results(batch.id)
    cancelled = own.messages.batches.cancel(batch.id)
    assert cancelled.processing_status in ("canceling", "ended") and cancelled.cancel_initiated_at is not None
    counts = ended(own, batch.id).request_counts
    assert counts.canceled > 0 and counts.canceled + counts.succeeded == 12
    kinds = [line.result.type for line in own.messages.batches.results(batch.id)]
    assert kinds.count("canceled") == counts.canceled and kinds.count("succeeded") == counts.succeeded


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "requests"),
        ([asked("a"), asked("a")], r"requests\.1\.custom_id"),
        ([asked("a", stream=True)], r"requests\.0\.params\.stream"),
        ([asked("")], r"requests\.0\.custom_id"),
        ([asked("a b")], r"requests\.0\.custom_id"),
        ([{"custom_id": "a"}], r"requests\.0\.params"),
        ([asked("a") | {"more": 1}], r"requests\.0\.more"),
    ],
)
def test_what_cannot_be_run_is_refused(own, requests, message):
    with pytest.raises(anthropic.BadRequestError, match=message):
        own.messages.batches.create(requests=requests)


def test_batches_are_visible_only_to_their_key(server, own):
    batch = own.messages.batches.create(requests=[asked("a")])
    with client_of(server, BOB) as other:
        assert other.messages.batches.list().data == []
        for ask in (other.messages.batches.retrieve, other.messages.batches.cancel, other.messages.batches.delete):
            with pytest.raises(anthropic.NotFoundError):
                ask(batch.id)
    for id in ("msgbatch_", "batch_" + batch.id.removeprefix("msgbatch_"), "msgbatch_../x"):
        answer = httpx.get(f"{server.url}/v1/messages/batches/{id}", headers=AS_ANN)
        assert answer.status_code == 404 and answer.json()["type"] == "error"


def test_both_apis_show_the_same_batch(server, own):
    batch = own.messages.batches.create(requests=[asked("a"), asked("b")])
    ended(own, batch.id)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=ANN.secret) as theirs:
        [same] = theirs.batches.list().data
        assert (same.endpoint, same.status, same.request_counts.completed) == ("/v1/messages", "completed", 2)
        lines = [json.loads(line) for line in theirs.files.content(same.output_file_id).text.splitlines()]
    reported = {line.custom_id: line.result.message.to_dict() for line in own.messages.batches.results(batch.id)}
    assert {line["custom_id"]: line["response"]["body"] for line in lines} == reported


def test_requests_that_were_not_run_have_results():
    """A batch that failed as a whole, one whose time was over, and a request that never reached its route."""
    given = b'{"custom_id":"a","method":"POST","url":"/v1/messages","body":{}}\n'
    failed = {"errors": {"data": [{"code": "gone", "message": "there is no such key any more"}]}}
    [result] = map(json.loads, failed_results(given, failed).splitlines())
    assert (
        result["custom_id"] == "a"
        and result["result"]["error"]["error"]["message"] == failed["errors"]["data"][0]["message"]
    )
    lines = [
        {"custom_id": "b", "response": None, "error": {"code": "batch_expired", "message": "x"}},
        {"custom_id": "c", "response": {"status_code": 500, "request_id": "r", "body": None}, "error": None},
    ]
    expired, lost = map(json.loads, results([b"\n".join(json.dumps(line).encode() for line in lines)]).splitlines())
    assert expired == {"custom_id": "b", "result": {"type": "expired"}}
    assert lost["result"]["error"]["type"] == "error" and lost["result"]["error"]["request_id"] == "r"
    for line in (result, expired, lost):
        anthropic.types.messages.MessageBatchIndividualResponse.model_validate(line)
