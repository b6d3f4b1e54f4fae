"""The vendors' own clients select adapters."""

from __future__ import annotations

import json

import ollama
import pytest
from huggingface_hub import InferenceClient

from kvasir.adapters import AdapterOption
from kvasir.engine.front import Front
from kvasir.inputs import Adapter
from tests.later import anthropic, openai
from tests.serve.fakes import byte_tokenizer, template
from tests.serve.running import live
from tests.serve.test_adapters import Recorded, written

ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    options = [AdapterOption(name, written(folder, name)) for name in ("sql", "math")]
    front = Front(Recorded(), byte_tokenizer(), template(), adapters=options)
    with live(front=front) as server:
        yield server


def got(server) -> list[tuple[Adapter, ...]]:
    requests = server.front.engine.got
    found = [tuple(Adapter(one.name, one.scale, one.start) for one in request.adapters) for request in requests]
    requests.clear()
    return found


def test_openai(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        parents = {model.id: getattr(model, "parent", None) for model in api.models.list()}
        assert parents == {"fake": None, "sql": "fake", "math": "fake"}
        assert api.chat.completions.create(model="sql", messages=ASK, max_tokens=1).model == "sql"
        stream = api.chat.completions.create(model="fake:math", messages=ASK, max_tokens=1, stream=True)
        assert {chunk.model for chunk in stream} == {"fake:math"}
        assert api.responses.create(model="sql", input="hi", max_output_tokens=1).model == "sql"
        assert api.embeddings.create(model="math", input="hi", encoding_format="float").model == "math"
        body = {"lora": [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 2}]}
        api.completions.create(model="fake", prompt="hi", max_tokens=1, extra_body=body)
        sql, math = (Adapter("sql"),), (Adapter("math"),)
        assert got(server) == [sql, math, sql, math, (Adapter("sql", 0.5), Adapter("math", 2.0))]
        with pytest.raises(openai.NotFoundError, match="'fake', 'sql', 'math'"):
            api.chat.completions.create(model="other", messages=ASK, max_tokens=1)


def test_anthropic(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as api:
        assert [model.id for model in api.models.list()] == ["fake", "sql", "math"]
        assert api.messages.create(model="sql", max_tokens=1, messages=ASK).model == "sql"
        with api.messages.stream(model="fake:math", max_tokens=1, messages=ASK) as stream:
            assert stream.get_final_message().model == "fake:math"
        assert got(server) == [(Adapter("sql"),), (Adapter("math"),)]
        with pytest.raises(anthropic.NotFoundError, match="'sql'"):
            api.messages.create(model="fake:other", max_tokens=1, messages=ASK)


def test_ollama(server):
    with ollama.Client(host=server.url) as api:
        assert [model.model for model in api.list().models] == ["fake", "sql", "math"]
        assert api.chat("sql", ASK, options={"num_predict": 1}).model == "sql"
        parts = api.generate("fake:math", "hi", options={"num_predict": 1}, stream=True)
        assert {part.model for part in parts} == {"fake:math"}
        assert api.embed("sql", "hi").model == "sql"
        api.chat("sql:latest", ASK, options={"num_predict": 1})
        assert got(server) == [(Adapter("sql"),), (Adapter("math"),), (Adapter("sql"),), (Adapter("sql"),)]
        with pytest.raises(ollama.ResponseError) as caught:
            api.chat("other", ASK)
        assert caught.value.status_code == 404 and "'sql'" in json.dumps(caught.value.error)


def test_hugging_face(server):
    api = InferenceClient(model=server.url)
    api.text_generation("hi", max_new_tokens=1, adapter_id="math")
    assert got(server) == [(Adapter("math"),)]
