"""Scores, rankings, labels and pooled results: the bodies of Cohere's, Jina's and vLLM's clients."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import pytest

from kvasir.engine.front import Front
from kvasir.text.chat import ChatTemplate
from kvasir.text.prompts import Prompts
from kvasir.types import Task
from tests.serve.fakes import BOS, EOS, POISON, EchoEngine, byte_tokenizer, template
from tests.serve.running import client, make_front

JUDGE: dict[str, Any] = {"tasks": (Task.CLASSIFY,), "info": {"labels": ("LABEL_0",), "activation": "identity"}}
LABELS: dict[str, Any] = {"tasks": (Task.CLASSIFY,), "info": {"labels": ("no", "yes"), "activation": "softmax"}}
TOKENS: dict[str, Any] = {
    "tasks": (Task.EMBED, Task.TOKEN_EMBED),
    "info": {"embedding_size": 2, "token_embedding_size": 2},
}


def ids_sum(*texts: str) -> float:
    """The fake's logit: the sum of the ids."""
    return float(sum(sum(text.encode()) for text in texts))


async def post(http, path: str, **fields: Any) -> Any:
    response = await http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


# --- rerank -----------------------------------------------------------------------------------------

QUERY = "What is the capital of France?"
DOCUMENTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris.", "Horses and cows are animals."]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_a_request_of_vllm_and_jina(path):
    async with client(**JUDGE) as http:
        answer = await post(http, path, model="fake", query=QUERY, documents=DOCUMENTS)
    scores = {i: ids_sum(QUERY, text) for i, text in enumerate(DOCUMENTS)}
    order = sorted(scores, key=lambda i: -scores[i])
    assert answer["results"] == [
        {"index": i, "relevance_score": scores[i], "document": {"text": DOCUMENTS[i]}} for i in order
    ]
    assert answer["id"].startswith("rerank-") and answer["model"] == "fake"
    tokens = sum(len(QUERY + text) for text in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


async def test_a_request_of_cohere():
    async with client(**JUDGE) as http:
        answer = await post(http, "/v2/rerank", model="fake", query=QUERY, documents=DOCUMENTS, top_n=2)
        assert [set(result) for result in answer["results"]] == [{"index", "relevance_score"}] * 2
        first = await post(
            http, "/v1/rerank", model="fake", query=QUERY, documents=[{"text": text} for text in DOCUMENTS],
            return_documents=False, top_n=1, rank_fields=["text"],
        )  # fmt: skip
        assert first["results"] == answer["results"][:1]


async def test_documents_are_cut_off_only_where_that_is_asked_for():
    async with client(**JUDGE) as http:
        response = await http.post("/rerank", json={"query": "ab", "documents": ["c" * 600, "d"]})
        assert response.status_code == 400 and "512" in response.json()["error"]["message"]
        answer = await post(http, "/rerank", query="ab", documents=["c" * 600, "d"], truncate_prompt_tokens=-1)
        assert answer["truncated"] == [0]
        assert {r["index"]: r["relevance_score"] for r in answer["results"]} == {
            0: ids_sum("ab", "c" * 510), 1: ids_sum("ab", "d")
        }  # fmt: skip
        answer = await post(http, "/v2/rerank", query="ab", documents=["cccc", "dd"], max_tokens_per_doc=3)
        assert answer["truncated"] == [0] and answer["results"][0]["relevance_score"] == ids_sum("ab", "ccc")
        answer = await post(http, "/rerank", query="ab", documents=["c" * 5], truncate_prompt_tokens=4)
        assert answer["results"][0]["relevance_score"] == ids_sum("ab", "cc")


async def test_a_template_renders_the_pair():
    source = (
        "{% for m in messages if m.role in ['system', 'query', 'document'] %}"
        '{{ m.role[0] }}={{ m.content }};{% if m.role == "query" or m.role == "document" %}{% endif %}{% endfor %}'
    )
    source = source.replace("'query', 'document'", '"query", "document"')
    front = Front(EchoEngine(**JUDGE), byte_tokenizer(), ChatTemplate(source))
    async with client(front=front) as http:
        answer = await post(http, "/score", text_1="ab", text_2=["cd", "e"])
        assert [d["score"] for d in answer["data"]] == [ids_sum("q=ab;d=cd;"), ids_sum("q=ab;d=e;")]
        answer = await post(http, "/rerank", query="ab", documents=["c"], instruction="do")
        assert answer["results"][0]["relevance_score"] == ids_sum("s=do;q=ab;d=c;")
        answer = await post(http, "/rerank", query="ab", documents=["cdefg"], max_tokens_per_doc=2)
        assert answer["results"][0]["relevance_score"] == ids_sum("q=ab;d=cd;") and answer["truncated"] == [0]
        answer = await post(http, "/rerank", query="ab", documents=["<eos>"])
        assert answer["results"][0]["relevance_score"] == ids_sum("q=ab;d=<eos>;"), "spelled out"


async def test_an_embedding_model_ranks_by_the_cosine():
    front = make_front(tasks=(Task.EMBED,), info={"embedding_size": 2})
    front.prompts = Prompts({"query": "q"})
    async with client(front=front) as http:
        answer = await post(http, "/rerank", query="b", documents=["ccc", "zz"])
        a, b = (ids_sum("qb"), 2.0), (ids_sum("zz"), 2.0)
        cosine = (a[0] * b[0] + a[1] * b[1]) / (math.hypot(*a) * math.hypot(*b))
        found = {r["index"]: r["relevance_score"] for r in answer["results"]}
        assert found[1] == pytest.approx(cosine) and answer["usage"]["prompt_tokens"] == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": "a"}, "documents"),
        ({"documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b"] * 3000}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": [{"image": "b"}]}, "documents"),
        ({"query": "a", "documents": ["b"], "max_chunks_per_doc": 3}, "max_chunks_per_doc"),
        ({"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ({"query": "a", "documents": ["b"], "instruction": "x"}, "instruction"),
        ({"query": "a", "documents": ["b"], "softmax": False}, "softmax"),
        ({"query": "a", "documents": ["b"], "other": 1}, "other"),
        ({"query": "a" * 600, "documents": ["b"]}, "documents"),
    ],
)
async def test_rankings_refused_by_name(fields, param):
    async with client(**JUDGE) as http:
        response = await http.post("/rerank", json=fields)
    assert response.status_code == 400
    assert str(response.json()["error"]["param"]).split(".")[0] == param


async def test_models_that_cannot_compare():
    async with client(tasks=(Task.GENERATE,)) as http:
        response = await http.post("/rerank", json={"query": "a", "documents": ["b"]})
        assert response.status_code == 400 and response.json()["error"]["param"] == "model"
    async with client(**LABELS) as http:
        response = await http.post("/score", json={"text_1": "a", "text_2": "b"})
        assert response.status_code == 400 and "2 labels" in response.json()["error"]["message"]


# --- score ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("fields", "pairs"),
    [
        ({"text_1": "ab", "text_2": "c"}, [("ab", "c")]),
        ({"text_1": "ab", "text_2": ["c", "d"], "encoding_format": "float"}, [("ab", "c"), ("ab", "d")]),
        ({"text_1": ["a", "b"], "text_2": ["c", "d"]}, [("a", "c"), ("b", "d")]),
        ({"queries": "ab", "documents": ["c", "d"]}, [("ab", "c"), ("ab", "d")]),
    ],
)
async def test_a_score_request_of_vllm(path, fields, pairs):
    async with client(**JUDGE) as http:
        answer = await post(http, path, model="fake", **fields)
    assert answer["object"] == "list" and answer["id"].startswith("score-")
    assert answer["data"] == [{"index": i, "object": "score", "score": ids_sum(*pair)} for i, pair in enumerate(pairs)]
    assert answer["usage"]["total_tokens"] == sum(len(a + b) for a, b in pairs)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"text_1": "a"}, {"text_1": "a", "documents": ["b"]}, {"text_1": ["a", "b"], "text_2": ["c"]},
        {"text_1": "a", "text_2": []}, {"text_1": "a", "text_2": "b", "queries": "a", "documents": "b"},
        {"text_1": [1], "text_2": "b"}, {"text_1": "a", "text_2": "b", "encoding_format": "base64"},
    ],
)  # fmt: skip
async def test_score_requests_that_make_no_pairs_are_refused(fields):
    async with client(**JUDGE) as http:
        assert (await http.post("/score", json=fields)).status_code == 400


async def test_logits_instead_of_scores():
    info = {"labels": ("LABEL_0",), "activation": "sigmoid"}
    async with client(tasks=(Task.CLASSIFY,), info=info) as http:
        assert (await post(http, "/score", text_1="a", text_2="b"))["data"][0]["score"] == 1.0
        answer = await post(http, "/score", text_1="a", text_2="b", use_activation=False)
        assert answer["data"][0]["score"] == ids_sum("ab")


# --- classify and pooling ---------------------------------------------------------------------------


async def test_a_classify_request_of_vllm():
    async with client(**LABELS) as http:
        answer = await post(http, "/classify", model="fake", input=[[97, 98], [1]])
        assert answer["id"].startswith("classify-") and answer["usage"]["prompt_tokens"] == 3
        first, second = answer["data"]
        assert first == {"index": 0, "label": "no", "probs": [1.0, math.exp(2 - 195)], "num_classes": 2}
        assert second["probs"] == [0.5, 0.5] and second["label"] == "no"
        answer = await post(http, "/classify", input="ab", use_activation=False)
        assert answer["data"][0]["probs"] == [195.0, 2.0]


async def test_a_pooling_request_of_vllm():
    async with client(**TOKENS) as http:
        answer = await post(http, "/pooling", model="fake", input="ab")
        assert answer["id"].startswith("pool-")
        assert answer["data"] == [{"index": 0, "object": "pooling", "data": [195.0, 2.0]}]
        answer = await post(http, "/pooling", input="ab", task="token_embed")
        assert answer["data"][0]["data"] == [[97.0, 0.0], [98.0, 1.0]]
        answer = await post(http, "/pooling", input="ab", task="token_embed", encoding_format="base64")
        assert struct.unpack("<4f", base64.b64decode(answer["data"][0]["data"])) == (97.0, 0.0, 98.0, 1.0)
        answer = await post(http, "/pooling", input="ab", dimensions=1)
        assert answer["data"][0]["data"] == [1.0]
        response = await http.post("/pooling", json={"input": "ab", "task": "classify"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "model"
        response = await http.post("/pooling", json={"input": "ab", "task": "token_embed", "dimensions": 1})
        assert response.status_code == 400 and response.json()["error"]["param"] == "dimensions"


async def test_weights_of_tokens_leave_out_those_around_the_text():
    info = {"token_weights": True, "token_embedding_size": 2}
    async with client(tasks=(Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY), info=info) as http:
        given = [[BOS, 97, 98, EOS]]
        answer = await post(http, "/pooling", input=given, task="token_embed")
        assert answer["data"][0]["data"] == [[97.0, 1.0], [98.0, 2.0], [EOS, 3.0]]


async def test_labels_of_each_token():
    info = {"labels": ("O", "B-PER"), "activation": "softmax"}
    async with client(tasks=(Task.TOKEN_CLASSIFY,), info=info) as http:
        answer = await post(http, "/pooling", input=[[7, 1]])
        assert answer["data"][0]["data"][1] == [0.5, 0.5]
        answer = await post(http, "/pooling", input=[[7, 1]], use_activation=False)
        assert answer["data"][0]["data"] == [[7.0, 0.0], [1.0, 1.0]]


async def test_a_response_that_would_be_too_large_is_refused():
    front = make_front(**{**TOKENS, "info": {"token_embedding_size": 1 << 20}})
    async with client(front=front) as http:
        response = await http.post("/pooling", json={"input": ["abc", "de"], "task": "token_embed"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "input"


async def test_a_text_that_fails_is_an_error():
    async with client(**JUDGE) as http:
        response = await http.post("/score", json={"text_1": POISON, "text_2": ["b", "c"]})
        assert response.status_code == 500 and "Secret" not in response.text


# --- embeddings with prompts ------------------------------------------------------------------------


async def test_embeddings_take_the_models_prompts():
    front = Front(
        EchoEngine(tasks=(Task.EMBED,)), byte_tokenizer(), template(), prompts=Prompts({"query": "q: ", "d": ""}, "d")
    )
    async with client(front=front) as http:

        async def first(**fields: Any) -> float:
            return (await post(http, "/v1/embeddings", **fields))["data"][0]["embedding"][0]

        assert await first(input="ab") == await first(input="ab", prompt_name="d") == ids_sum("ab")
        assert await first(input="ab", prompt_name="query") == ids_sum("q: ab")
        assert await first(input=[97], prompt_name="query") == 97.0
        response = await http.post("/v1/embeddings", json={"input": "ab", "prompt_name": "x"})
        assert response.status_code == 400 and "query, d" in response.json()["error"]["message"]


# --- pooling: none ----------------------------------------------------------------------------------


async def test_embeddings_without_pooling_are_those_of_the_tokens():
    async with client(**TOKENS) as http:
        pooled = (await post(http, "/pooling", input=["ab", "c"], task="token_embed"))["data"]
        answer = await post(http, "/v1/embeddings", input=["ab", "c"], pooling="none")
        assert [one["embedding"] for one in answer["data"]] == [one["data"] for one in pooled]
        assert [len(one["embedding"]) for one in answer["data"]] == [2, 1]
        packed = await post(http, "/v1/embeddings", input=["ab", "c"], pooling="none", encoding_format="base64")
        flat = [x for row in pooled[0]["data"] for x in row]
        assert list(struct.unpack("<4f", base64.b64decode(packed["data"][0]["embedding"]))) == flat
        [one, other] = (await http.post("/embedding", json={"content": ["ab", "c"], "pooling": "none"})).json()
        assert one["embedding"] == pooled[0]["data"] and other["embedding"] == pooled[1]["data"]
        [one] = (await http.post("/embedding", json={"content": "ab", "pooling": "none", "embd_normalize": 2})).json()
        assert [math.hypot(*row) for row in one["embedding"]] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("fields", [{"pooling": "mean"}, {"pooling": "none", "dimensions": 1}])
async def test_other_poolings_are_refused(fields):
    async with client(**TOKENS) as http:
        response = await http.post("/v1/embeddings", json={"input": "ab", **fields})
        assert response.status_code == 400 and response.json()["error"]["param"] in ("pooling", "dimensions")


async def test_a_model_without_embeddings_of_tokens_refuses_them(http):
    for path, name in (("/v1/embeddings", "input"), ("/embedding", "content")):
        response = await http.post(path, json={name: "ab", "pooling": "none"})
        assert response.status_code == 400 and "token_embed" in response.json()["error"]["message"]


async def test_a_response_of_too_many_numbers_is_refused():
    front = make_front(**{**TOKENS, "info": {"token_embedding_size": 1 << 20}})
    async with client(front=front) as http:
        for path, name in (("/v1/embeddings", "input"), ("/embedding", "content")):
            response = await http.post(path, json={name: ["abc", "de"], "pooling": "none"})
            assert response.status_code == 400 and "numbers" in response.json()["error"]["message"]
