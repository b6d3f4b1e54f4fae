"""Text Generation Inference's own routes: the engine repeats its prompt."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from kvasir.serve.settings import ServeSettings
from tests.serve.fakes import POISON
from tests.serve.running import client, live

PROMPTS = ("abc", "é, a longer prompt with ümläuts and 😀 in it", "<s>")


async def ask(http, path: str = "/generate", inputs: str = "abc", **parameters):
    response = await http.post(path, json={"inputs": inputs, "parameters": {"max_new_tokens": 5, **parameters}})
    assert response.status_code == 200, response.text
    return response.json()


async def tokens(http, inputs: str, **parameters) -> list[dict]:
    body = {"inputs": inputs, "parameters": {"max_new_tokens": 40, **parameters}}
    response = await http.post("/generate_stream", json=body)
    assert response.status_code == 200, response.text
    parts = [part for part in response.text.split("\n\n") if part.startswith("data:")]
    return [json.loads(part.removeprefix("data:")) for part in parts]


async def refused(http, status: int = 422, path: str = "/generate", **body) -> dict:
    response = await http.post(path, json={"inputs": "abc", **body})
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error", "error_type"}
    return response.json()


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_the_texts_of_streamed_tokens_are_the_generated_text(http, prompt):
    whole = await ask(http, inputs=prompt, max_new_tokens=40, details=True)
    streamed = await tokens(http, prompt, details=True)
    text = "".join(one["token"]["text"] for one in streamed if not one["token"]["special"])
    assert text == whole["generated_text"] == streamed[-1]["generated_text"]
    assert [one["index"] for one in streamed] == [*range(1, len(streamed) + 1)]
    assert [one["token"]["id"] for one in streamed] == [one["id"] for one in whole["details"]["tokens"]]
    assert all(one["generated_text"] is None and one["details"] is None for one in streamed[:-1])
    ending = streamed[-1]["details"]
    assert {name: ending[name] for name in ("finish_reason", "generated_tokens", "seed")} == {
        name: whole["details"][name] for name in ("finish_reason", "generated_tokens", "seed")
    }


async def test_the_root_answers_with_a_list_or_a_stream(http):
    assert await ask(http, "/") == [await ask(http)]
    response = await http.post("/", json={"inputs": "abc", "stream": True, "parameters": {"max_new_tokens": 2}})
    assert response.text.startswith("data:")
    assert "text/html" in (await http.get("/")).headers["content-type"]  # the page keeps GET


async def test_details_report_the_prompt_the_candidates_and_the_end(http):
    found = await ask(http, details=True, decoder_input_details=True, top_n_tokens=3, return_full_text=True)
    assert found["generated_text"].startswith("abc")
    details = found["details"]
    assert details["finish_reason"] == "length" and details["generated_tokens"] == len(details["tokens"]) == 5
    assert [token["text"] for token in details["prefill"]] == ["a", "b", "c"]
    assert details["prefill"][0]["logprob"] is None and details["seed"] is None
    assert [len(top) for top in details["top_tokens"]] == [3] * 5
    for top in details["top_tokens"]:
        logprobs = [one["logprob"] for one in top]
        assert logprobs == sorted(logprobs, reverse=True)


async def test_a_stop_string_stays_in_the_text(http):
    found = await ask(http, inputs="abcdef", stop=["d"], max_new_tokens=20, details=True)
    assert found["generated_text"].endswith("d") and found["details"]["finish_reason"] == "stop_sequence"


async def test_truncate_keeps_the_last_tokens(http):
    cut = await ask(http, inputs="xyzabc", truncate=3)
    assert cut == await ask(http, inputs="abc")


async def test_best_of_returns_the_most_probable_choice_and_the_others(http):
    found = (await ask(http, best_of=3, temperature=2.0, details=True))["details"]
    sums = [
        sum(token["logprob"] for token in one["tokens"]) / len(one["tokens"])
        for one in (found, *found["best_of_sequences"])
    ]
    assert len(sums) == 3 and sums == sorted(sums, reverse=True)
    assert found["seed"] is not None


async def test_a_seed_reproduces_the_text(http):
    first, second = [await ask(http, temperature=5.0, seed=7, max_new_tokens=20) for _ in range(2)]
    assert first == second
    assert first != await ask(http, temperature=5.0, seed=8, max_new_tokens=20)


async def test_sampling_is_off_unless_asked_for(http):
    details = (await ask(http, details=True))["details"]
    assert details["seed"] is None
    assert (await ask(http, details=True, do_sample=True))["details"]["seed"] is not None


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        ({"watermark": True}, "watermark"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 2, "temperature": 1.0, "seed": 1}, "best_of"),
        ({"best_of": 1000, "temperature": 1.0}, "best_of"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 10**9}, "max_new_tokens"),
        ({"top_n_tokens": 1000}, "top_n_tokens"),
        ({"temperature": 0}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"grammar": {"type": "regex", "value": {}}}, "grammar"),
        ({"grammar": {"type": "regex", "value": "("}}, "grammar"),
        ({"grammar": {"type": "lark", "value": "x"}}, "type"),
        ({"truncate": 0}, "truncate"),
        ({"temprature": 1}, "temprature"),
    ],
)
async def test_a_bad_parameter_is_refused_by_name(http, parameters, name):
    error = await refused(http, parameters=parameters)
    assert error["error_type"] == "validation" and name in error["error"]


async def test_what_cannot_be_streamed_is_refused(http):
    for name, value in (("best_of", 2), ("decoder_input_details", True)):
        error = await refused(http, path="/generate_stream", parameters={name: value, "temperature": 1.0})
        assert name in error["error"]


async def test_errors_have_the_format_and_the_status_of_the_api(http):
    assert "inputs" in (await refused(http, inputs=""))["error"]
    assert "tokens" in (await refused(http, inputs="x" * 100_000))["error"]
    assert (await refused(http, 404, model="other"))["error_type"] == "validation"
    assert (await refused(http, 424, inputs=POISON))["error_type"] == "generation"


async def test_info_states_the_model_and_its_limits(http):
    info = (await http.get("/info")).json()
    assert info["max_input_tokens"] == info["max_total_tokens"] - 1
    model = (await http.get("/v1/models")).json()["data"][0]["id"]
    assert info["model_id"] == model and (await http.get("/info", params={"model": model})).json() == info
    assert (await http.get("/info", params={"model": "other"})).status_code == 404


async def test_a_key_is_needed_to_generate_at_the_root():
    """The page at the root is open; POST to it is not."""
    async with client(ServeSettings(api_keys=("one-key-one-key",))) as http:
        assert (await http.get("/")).status_code == 200
        assert (await http.post("/", json={"inputs": "abc"})).status_code == 401
        response = await http.post("/", json={"inputs": "abc"}, headers={"authorization": "Bearer one-key-one-key"})
        assert response.status_code == 200


def test_the_vendors_client_reads_responses_streams_and_errors():
    with live() as server:
        own = InferenceClient(server.url)
        text = own.text_generation("abc", max_new_tokens=6)
        whole = own.text_generation("abc", max_new_tokens=6, details=True, top_n_tokens=2, decoder_input_details=True)
        assert whole.generated_text == text and whole.details.finish_reason == "length"
        assert len(whole.details.tokens) == len(whole.details.top_tokens) == 6
        assert "".join(own.text_generation("abc", max_new_tokens=6, stream=True)) == text
        last = list(own.text_generation("abc", max_new_tokens=6, stream=True, details=True))[-1]
        assert last.generated_text == text and last.details.generated_tokens == 6
        with pytest.raises(ValidationError):
            own.text_generation("abc", max_new_tokens=0)
