"""Embeddings, models, tokens, and what the server tells about itself."""

from __future__ import annotations

import base64
import math
import re
import struct

import pytest

from kvasir.engine.front import Front
from kvasir.serve.settings import ServeSettings
from kvasir.types import Task
from tests.serve.fakes import EOS, POISON, TEMPLATE, VOCAB, EchoEngine
from tests.serve.running import client, make_front


async def embed(http, **fields):
    return await http.post("/v1/embeddings", json=fields)


@pytest.mark.parametrize(
    ("given", "sums"),
    [
        ("ab", [195.0]),
        (["ab", "c"], [195.0, 99.0]),
        ([97, 98], [195.0]),
        ([[97, 98], [99]], [195.0, 99.0]),
        (["ab", [99], "d"], [195.0, 99.0, 100.0]),
    ],
)
async def test_embeddings_of_every_kind_of_input(http, given, sums):
    answer = (await embed(http, input=given)).json()
    assert [e["embedding"][0] for e in answer["data"]] == sums  # the fake sums the ids
    assert [e["index"] for e in answer["data"]] == list(range(len(sums)))
    assert answer["object"] == "list" and answer["model"] == "fake"
    tokens = sum(e["embedding"][1] for e in answer["data"])
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_embeddings_in_base64_are_little_endian_float32(http):
    data = (await embed(http, input="ab", encoding_format="base64")).json()["data"][0]["embedding"]
    assert struct.unpack("<2f", base64.b64decode(data)) == (195.0, 2.0)


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_the_first_dimensions_have_the_length_1(encoding):
    async with client(front=make_front(info={"embedding_size": 2})) as http:
        answer = (await embed(http, input="ab", dimensions=1, encoding_format=encoding)).json()
        whole = (await embed(http, input="ab", dimensions=2)).json()["data"][0]["embedding"]
    given = answer["data"][0]["embedding"]
    assert (list(struct.unpack("<f", base64.b64decode(given))) if encoding == "base64" else given) == [1.0]
    assert math.hypot(*whole) == pytest.approx(1) and whole[0] / whole[1] == pytest.approx(195 / 2)


async def test_many_inputs_keep_their_order(http):
    answer = (await embed(http, input=[[i] for i in range(32, 232)])).json()
    assert [e["embedding"][0] for e in answer["data"]] == list(map(float, range(32, 232)))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [300]}, "input"),
        ({"input": "x" * 600}, "input"),
        ({"input": "x", "dimensions": 5}, "dimensions"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({}, "input"),
    ],
)
async def test_embeddings_refused_by_name(http, fields, param):
    response = await embed(http, **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


async def test_tasks_that_a_model_cannot_do():
    async with client(tasks=(Task.GENERATE,)) as http:
        assert (await embed(http, input="x")).json()["error"]["param"] == "model"
    async with client(tasks=(Task.EMBED,)) as http:
        response = await http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 400 and "generate" in response.json()["error"]["message"]


async def test_an_input_that_fails_is_an_error(http):
    response = await embed(http, input=["a", POISON])
    assert response.status_code == 500 and "Secret" not in response.text


async def test_models_by_all_their_names():
    async with client(ServeSettings(model_names=("org/one", "two"))) as http:
        data = (await http.get("/v1/models")).json()
        assert data["object"] == "list" and [m["id"] for m in data["data"]] == ["org/one", "two"]
        one = (await http.get("/v1/models/org/one")).json()
        assert one["object"] == "model" and one["max_model_len"] == 512 and one["root"] == "org/one"
        assert (await http.get("/v1/models/fake")).status_code == 404
        for route, fields in (
            ("completions", {"prompt": "x"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("embeddings", {"input": "x"}),
        ):
            response = await http.post(f"/v1/{route}", json={"model": "fake", **fields})
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert (await http.post(f"/v1/{route}", json={"model": "two", **fields})).json()["model"] == "org/one"


async def test_texts_and_conversations_to_tokens_and_back(http):
    tokens = (await http.post("/tokenize", json={"prompt": "né", "return_token_strs": True})).json()
    assert tokens == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [110, 0xC3, 0xA9],
        "token_strs": ["n", "\ufffd", "\ufffd"],
    }
    chat = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"shout": "!"}}
    tokens = (await http.post("/tokenize", json=chat)).json()["tokens"]
    text = (await http.post("/detokenize", json={"tokens": tokens})).json()
    assert text == {"prompt": "user: hi\n!assistant: ", "content": "user: hi\n!assistant: "}
    assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": "", "content": ""}
    for bad in ({}, {"prompt": "x", "messages": chat["messages"]}, {"prompt": 5}):
        assert (await http.post("/tokenize", json=bad)).json()["error"]["param"] == "prompt"
    assert (await http.post("/detokenize", json={"tokens": [999]})).json()["error"]["param"] == "tokens"


async def test_health_follows_the_engine(http):
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.head("/health")).status_code == 200


async def test_health_of_a_dead_engine():
    async with client() as http:
        alive, http.front.engine.alive = http.front.engine.alive, lambda timeout: _false()
        response = await http.get("/health")
        assert response.status_code == 503
        assert response.json() == {"model": "fake", "status": "engine does not answer"}
        http.front.engine.alive = alive


async def _false() -> bool:
    return False


async def test_the_server_states_its_version_and_models(http):
    assert (await http.get("/version")).json().keys() == {"version"}
    assert (await http.get("/kvasir/info")).json()["models"] == ["fake"]
    schema = (await http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings"} <= set(schema["paths"])
    own = {path for path, operations in schema["paths"].items() if "422" in str(operations)}
    assert own == {"/", "/generate", "/generate_stream", "/info"}, "a status of one dialect alone"


async def test_metrics_count_what_happened(http):
    await http.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 5, "n": 2})
    await http.post("/v1/completions", json={"prompt": "abcd", "max_tokens": 50, "stop": "c", "temperature": 0})
    await http.post("/v1/completions", json={"prompt": 5})
    await http.get("/nowhere/special")
    text = (await http.get("/metrics")).text

    def value(name: str) -> float:
        found = re.search(rf"^kvasir_{re.escape(name)} (\S+)$", text, re.M)
        assert found, f"{name} is not in\n{text}"
        return float(found[1])

    model = 'model_name="fake"'
    assert value('http_requests_total{code="200",method="POST",route="/v1/completions"}') == 2
    assert value('http_requests_total{code="400",method="POST",route="/v1/completions"}') == 1
    assert value('http_requests_total{code="404",method="GET",route="other"}') == 1
    assert value(f'answers_total{{finish_reason="length",{model}}}') == 2
    assert value(f'answers_total{{finish_reason="stop",{model}}}') == 1
    assert value(f"prompt_tokens_total{{{model}}}") == 8
    assert value(f"generated_tokens_total{{{model}}}") == 13
    interactive = f'{model},service_class="interactive"'
    assert value(f"time_to_first_token_seconds_count{{{interactive}}}") == 3
    assert value(f"time_per_output_token_seconds_count{{{interactive}}}") == 10
    assert value(f"queue_time_seconds_count{{{interactive}}}") == 3
    assert value(f'request_seconds_bucket{{le="+Inf",{model}}}') == 2
    assert value(f"request_prompt_tokens_sum{{{model}}}") == 8
    assert value(f"kv_usage_ratio{{{model}}}") == 0
    assert value(f"engine_steps_total{{{model}}}") > 5
    for name in ("requests_open", "preemptions_total", "kv_blocks"):
        value(f"{name}{{{model}}}")
    for service_class in ("interactive", "batch", "background"):
        for name in ("running", "waiting", "in_time_total", "late_total", "expired_total", "displaced_total"):
            assert value(f'answers_{name}{{{model},service_class="{service_class}"}}') == 0


async def test_the_tokenizer_is_described(http):
    found = (await http.get("/tokenizer_info?model=fake")).json()
    assert found["tokenizer_class"] and found["bos_token"] == "<bos>" and found["eos_token"] == "<eos>"
    assert found["chat_template"] == TEMPLATE and found["vocab_size"] == VOCAB
    assert found["added_tokens_decoder"][str(EOS)] == {"content": "<eos>", "special": True}
    assert (await http.get("/tokenizer_info?model=nothing")).status_code == 404


async def test_a_model_without_a_tokenizer_has_nothing_to_describe():
    async with client(front=Front(EchoEngine())) as http:
        assert (await http.get("/tokenizer_info")).status_code == 400
