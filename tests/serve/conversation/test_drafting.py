"""Predictions and the choice of drafters, from a request's fields to its usage. No draft changes an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import ollama
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvasir.engine.pace import Pace
from kvasir.serve.conversation.timings import timings_object
from kvasir.speculation import MAX_DRAFTED
from kvasir.types import Usage
from tests.examples import examples
from tests.later import anthropic, openai
from tests.serve.dialects.table import ROWS
from tests.serve.fakes import Echoed
from tests.serve.running import client, events, live

CHAT = "/v1/chat/completions"
TEXT = "the cat sat on the mat"
ANSWER = f"user: {TEXT}\nassistant: "  # what the model echoes


def chat(**fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": len(ANSWER),
        "temperature": 0,
        **fields,
    }


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from request to request."""
    own = {name: value for name, value in answer.items() if name not in ("id", "created")}
    return own | {"usage": {name: n for name, n in answer["usage"].items() if "details" not in name}}


async def test_a_prediction_equal_to_the_answer_is_accepted_and_changes_nothing():
    async with client(drafts=True) as http:
        without = (await http.post(CHAT, json=chat())).json()
        answer = (await http.post(CHAT, json=chat(**predicted(ANSWER)))).json()
        parts = [{"type": "text", "text": ANSWER[:7]}, {"type": "text", "text": ANSWER[7:]}]
        in_parts = (await http.post(CHAT, json=chat(**predicted(parts)))).json()
    assert plain(answer) == plain(without) == plain(in_parts)
    details = answer["usage"]["completion_tokens_details"]
    assert details["rejected_prediction_tokens"] == 0
    # The last token of each step is not drafted: the sampler gives it besides those it checks, 8 at most here.
    assert details["accepted_prediction_tokens"] >= len(ANSWER) * 8 // 9 - 2
    assert in_parts["usage"]["completion_tokens_details"] == details
    assert "completion_tokens_details" not in without["usage"]


async def test_usage_adds_up_with_any_prediction():
    async with client(drafts=True) as http:
        for text in ("", "x" * 50, ANSWER[:9] + "!!" + ANSWER[11:], ANSWER * 3, "user: <eos> the cat <|end|>"):
            answer = (await http.post(CHAT, json=chat(n=2, logprobs=True, **predicted(text)))).json()
            usage, details = answer["usage"], answer["usage"]["completion_tokens_details"]
            assert [choice["message"]["content"] for choice in answer["choices"]] == [ANSWER] * 2
            assert 0 <= details["accepted_prediction_tokens"] <= usage["completion_tokens"] == 2 * len(ANSWER)
            assert bool(details["rejected_prediction_tokens"]) == (text not in ("", ANSWER * 3)), text


@examples(30)
@given(st.lists(st.sampled_from([*ANSWER, "!", "é"]), max_size=60), st.integers(0, 20), st.integers(1, 40))
async def test_any_prediction_gives_the_same_stream(letters, kept, length):
    """With a stop string that may end the answer within a draft: what comes after it is rejected."""
    text = ANSWER[:kept] + "".join(letters)
    body = chat(stop=["mat\n", "assi"], max_tokens=length, stream=True, stream_options={"include_usage": True})
    async with client(drafts=True) as http:
        without = events((await http.post(CHAT, json=body)).text)
        found = events((await http.post(CHAT, json={**body, **predicted(text)})).text)

    def content(chunks: list[dict]) -> str:
        return "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])

    assert content(found) == content(without)
    assert found[-1]["usage"]["completion_tokens"] == without[-1]["usage"]["completion_tokens"]
    details = found[-1]["usage"]["completion_tokens_details"]
    assert 0 <= details["accepted_prediction_tokens"] <= found[-1]["usage"]["completion_tokens"]
    assert details["rejected_prediction_tokens"] >= 0


async def test_drafted_tokens_are_marked_where_times_are_asked_for():
    body = chat(stream=True, logprobs=True, **predicted(ANSWER))
    async with client(drafts=True) as http:
        unmarked = (await http.post(CHAT, json=body)).text
        chunks = events((await http.post(CHAT, json={**body, "timings_per_token": True})).text)
    assert '"drafted"' not in unmarked
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    marks = [entry.get("drafted", False) for each in logprobs if each for entry in each["content"]]
    timings = chunks[-1]["timings"]
    assert len(marks) == len(ANSWER) and sum(marks) == timings["draft_n_accepted"] == timings["draft_n"] > 0


@pytest.mark.parametrize(
    "given, named",
    [
        ({"prediction": {"type": "image", "content": "x"}}, "image"),
        ({"prediction": {"type": ["content"], "content": "x"}}, "prediction"),
        ({"prediction": "x"}, "prediction"),
        ({"prediction": {"type": "content"}}, "content"),
        ({"prediction": {"type": "content", "content": None}}, "content"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url", "image_url": "x"}]}}, "content"),
        (predicted("long " * 500), "prediction"),
        (predicted("x" * 10_000_000), "prediction"),
        ({"speculation": "ngram"}, "speculation"),
        ({"speculation": {"method": "mtp"}}, "it has ngram"),
        ({"speculation": {"method": "guess"}}, "ngram, suffix"),
        ({"speculation": {"method": [["ngram"]]}}, "speculation"),
        ({"speculation": {"model": "x"}}, "speculation.model"),
        ({"speculation": {"num_speculative_tokens": -1}}, "num_speculative_tokens"),
        ({"speculation": {"num_speculative_tokens": True}}, "num_speculative_tokens"),
    ],
)
async def test_what_cannot_be_used_is_refused_by_name(given, named):
    async with client(drafts=True) as http:
        answer = await http.post(CHAT, json=chat(**given))
    assert answer.status_code == 400 and named in answer.text, answer.text


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
async def test_each_route_that_generates_has_the_choice_of_drafters(row):
    async with client(drafts=True) as http:
        for speculation in ({"method": "off"}, {"method": ["ngram"]}, {"method": "auto", "num_speculative_tokens": 0}):
            answer = await http.post(row.path, json={**row.request("abc", length=3), "speculation": speculation})
            assert answer.status_code == 200, answer.text
        refused = await http.post(row.path, json={**row.request("abc"), "speculation": {"method": "suffix"}})
        assert refused.status_code in (400, 422) and "ngram" in refused.text


@pytest.mark.parametrize(
    "wanted, most",
    [(None, 8), ({"num_speculative_tokens": 2}, 2), ({"num_speculative_tokens": 10**30}, 8), ({"method": "off"}, 0)],
)
async def test_a_request_has_as_many_drafts_as_it_wants(wanted, most):
    body = chat(**predicted(ANSWER), **({} if wanted is None else {"speculation": wanted}))
    async with client(drafts=True) as http:
        answer = (await http.post(CHAT, json=body)).json()
        steps = (await http.front.stats()).steps  # type: ignore[attr-defined]
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert bool(answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]) == bool(most)
    assert len(ANSWER) // (most + 1) <= steps <= len(ANSWER) // (most + 1) + 4


async def test_an_engine_without_drafters_takes_auto_and_off_only():
    async with client() as http:
        for method in ("auto", "off"):
            assert (await http.post(CHAT, json=chat(speculation={"method": method}))).status_code == 200
        refused = await http.post(CHAT, json=chat(speculation={"method": "ngram"}))
    assert refused.status_code == 400 and "has none" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "path, body, most",
    [
        ("/completion", {"speculative.n_max": 4, "speculative.n_min": 9, "speculative.p_min": 0.5}, 4),
        ("/completion", {"speculative.n_max": 64}, MAX_DRAFTED),
        ("/completion", {"speculative.n_max": 4, "speculation": {"num_speculative_tokens": 2}}, 2),
        ("/completion", {"speculation": {"num_speculative_tokens": 5}}, 5),
        ("/api/generate", {"options": {"draft_num_predict": 3}}, 3),
        ("/api/generate", {"options": {"draft_num_predict": -1}}, None),
        ("/api/chat", {"options": {"draft_num_predict": 0}, "messages": [{"role": "user", "content": TEXT}]}, 0),
    ],
)
async def test_fields_of_other_servers_bound_drafts(path, body, most):
    own = {} if "messages" in body else {"prompt": TEXT}
    short = {"options": {"num_predict": 3, **body["options"]}} if "options" in body else {"n_predict": 3}
    async with client(drafts=True) as http:
        front, made = http.front, []  # type: ignore[attr-defined]
        resolve = front.resolve
        front.resolve = lambda *args, **fields: made.append(resolve(*args, **fields)) or made[-1]
        answer = await http.post(path, json={"model": "fake", "stream": False, **own, **body, **short})
    assert answer.status_code == 200, answer.text
    [request] = made
    assert (request.speculation and request.speculation.most) == most


async def test_llamacpps_times_count_drafts_where_there_are_any():
    async with client(drafts=True) as http:
        answer = (await http.post("/completion", json={"prompt": TEXT, "n_predict": 3})).json()
        assert "draft_n" not in answer["timings"]
        refused = await http.post("/completion", json={"prompt": TEXT, "speculative.n_max": -1})
    assert refused.status_code == 400 and "speculative.n_max" in refused.text
    timings = timings_object(Pace(0.0), Usage(1, 9, 0, 0, 4, 2))
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (6, 4)


async def test_llamacpps_settings_name_the_drafters():
    names = [f"speculative.{name}" for name in ("types", "n_max", "n_min", "p_min")]
    async with client(drafts=True) as http:
        shown = [(await http.get("/props")).json()["default_generation_settings"]["params"]]
        for own in ({}, {"speculative.n_max": 3}, {"speculation": {"method": "off"}}):
            body = {"prompt": TEXT, "n_predict": 1, **own}
            shown.append((await http.post("/completion", json=body)).json()["generation_settings"])
        assert {slot["speculative"] for slot in (await http.get("/slots")).json()} == {True}
    usual = ["ngram-simple", 8, 0, 0.0]
    found = [[settings[name] for name in names] for settings in shown]
    assert found == [usual, usual, ["ngram-simple", 3, 0, 0.0], ["none", 0, 0, 0.0]]
    async with client() as http:
        settings = (await http.get("/props")).json()["default_generation_settings"]["params"]
    assert [settings[name] for name in names] == ["none", 0, 0, 0.0]


# -- the vendors' own clients --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafting():
    with live(drafts=True) as server:
        yield server


@pytest.mark.slow
def test_the_official_client_sends_predictions(drafting):
    with openai.OpenAI(base_url=f"{drafting.url}/v1", api_key="none", max_retries=0) as api:
        prediction = {"type": "content", "content": [{"type": "text", "text": ANSWER}]}
        body = {"model": "fake", **chat(), "prediction": prediction}
        answer = api.chat.completions.create(**body)
        details = answer.usage.completion_tokens_details
        assert answer.choices[0].message.content == ANSWER
        assert details.accepted_prediction_tokens > 30 and details.rejected_prediction_tokens == 0
        chunks = list(api.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == ANSWER and chunks[-1].usage.completion_tokens_details == details
        own = {"speculation": {"method": "off"}}
        without = api.chat.completions.create(**body, extra_body=own).usage.completion_tokens_details
        assert without.accepted_prediction_tokens == without.rejected_prediction_tokens == 0
        answer = api.responses.create(model="fake", input=TEXT, max_output_tokens=4, extra_body=own)
        assert answer.usage.output_tokens == 4
        with pytest.raises(openai.BadRequestError, match="it has ngram"):
            api.completions.create(model="fake", prompt="x", extra_body={"speculation": {"method": "eagle3"}})


def test_the_async_client_streams_what_it_predicts(drafting):
    async def streamed() -> tuple[str, Any]:
        async with openai.AsyncOpenAI(base_url=f"{drafting.url}/v1", api_key="none", max_retries=0) as api:
            prediction = {"type": "content", "content": ANSWER[:20] + "!" + ANSWER[20:]}
            body = {"model": "fake", **chat(n=2), "prediction": prediction}
            text, usage = "", None
            options = {"include_usage": True}
            async for chunk in await api.chat.completions.create(**body, stream=True, stream_options=options):
                text += "".join(c.delta.content or "" for c in chunk.choices if c.index == 1)
                usage = chunk.usage or usage
            return text, usage

    text, usage = asyncio.run(streamed())
    details = usage.completion_tokens_details
    assert text == ANSWER and usage.completion_tokens == 2 * len(ANSWER)
    assert details.accepted_prediction_tokens >= 20 and details.rejected_prediction_tokens >= 2


def test_drafts_change_neither_answers_nor_usage_of_other_clients():
    """Ollama's and Anthropic's answers have no place for counts of drafts, and those that they have stay the same."""
    messages = [{"role": "user", "content": TEXT}]

    def asked(url: str) -> list[Any]:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as api, ollama.Client(host=url) as own:
            ask = {"model": "fake", "max_tokens": 30, "messages": messages, "extra_body": {"temperature": 0}}
            answer = api.messages.create(**ask)
            with api.messages.stream(**ask) as stream:
                streamed = stream.get_final_message()
            options = {"temperature": 0, "num_predict": 30, "seed": 1}
            chats = [
                own.chat("fake", messages, options=options),
                *own.chat("fake", messages, options=options, stream=True),
            ]
            made = [own.generate("fake", TEXT, options={**options, **more}) for more in ({}, {"draft_num_predict": 2})]
        text = "".join(one.message.content for one in chats[1:])
        said = [chats[0].message.content, text, *(one.response for one in made)]
        counts = [(one.done_reason, one.prompt_eval_count, one.eval_count) for one in (chats[0], chats[-1], *made)]
        return [*((one.content[0].text, one.stop_reason, one.usage) for one in (answer, streamed)), *said, *counts]

    with live() as plain, live(drafts=Echoed()) as server:
        assert asked(server.url) == asked(plain.url)
        stats = server.ask(server.front.stats())
        assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_anthropics_client_chooses_drafters(drafting):
    with anthropic.Anthropic(base_url=drafting.url, api_key="none", max_retries=0) as api:
        ask = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": TEXT}]}
        answer = api.messages.create(**ask, extra_body={"speculation": {"method": ["ngram"]}})
        assert answer.usage.output_tokens == 4
        with pytest.raises(anthropic.BadRequestError, match="it has ngram"):
            api.messages.create(**ask, extra_body={"speculation": {"method": "mtp"}})


def test_the_counters_of_drafts_are_exported(drafting):
    httpx.post(f"{drafting.url}{CHAT}", json=chat(**predicted(ANSWER[:20] + "!!"))).raise_for_status()
    text = httpx.get(f"{drafting.url}/metrics").text
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    drafted, accepted = (
        next(sample.value for sample in found[f"kvasir_{name}"] if sample.name.endswith("_total"))
        for name in ("drafted_tokens", "accepted_draft_tokens")
    )
    assert 0 < accepted < drafted
    by_position = [s for s in found["kvasir_draft_position_drafted"] if s.name.endswith("_total")]
    assert sum(sample.value for sample in by_position) == drafted
    assert {"position", "model_name"} <= by_position[0].labels.keys()
    assert "kvasir_draft_seconds_saved" in found
