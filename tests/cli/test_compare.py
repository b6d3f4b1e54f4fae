"""`kvasir embed` and `kvasir rerank`: what they print."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from kvasir import LLM
from kvasir.cli.app import app
from kvasir.errors import KvasirError
from tests.engine.folders import with_tokenizer

pytest.importorskip("torch")
pytest.importorskip("transformers")

QUERY, DOCUMENTS = "what is the capital?", ["paris is the capital", "the cat sat", "a dog ran"]
SMALL = ["--dtype", "float32", "--threads", "1", "--num-blocks", "40"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return with_tokenizer("bert-pairs", tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return with_tokenizer("bert", tmp_path_factory.mktemp("embedder"), prompts={"prompts": {"query": "what is "}})


def run(*arguments: str, given: str | None = None) -> list[str]:
    result = CliRunner().invoke(app, [*arguments, *SMALL], input=given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.mark.slow
def test_documents_are_printed_best_first(judge):
    with LLM(judge, dtype="float32", threads=1, num_blocks=40, progress=False) as llm:
        expected = llm.rerank(QUERY, DOCUMENTS)
    lines = run("rerank", judge, QUERY, "-q", given="\n".join(DOCUMENTS))
    assert lines == [f"{score:9.6f}  {DOCUMENTS[i]}" for i, score in expected]
    found = [json.loads(line) for line in run("rerank", judge, QUERY, *DOCUMENTS, "-q", "--json", "--top-n", "2")]
    assert [(one["index"], one["score"]) for one in found] == expected[:2]


def test_embeddings_are_lines_of_json(embedder):
    found = [json.loads(line) for line in run("embed", embedder, *DOCUMENTS, "-q")]
    assert [one["text"] for one in found] == DOCUMENTS and {len(one["embedding"]) for one in found} == {48}
    [first] = run("embed", embedder, DOCUMENTS[0], "-q", "--dimensions", "4", "--prompt-name", "query")
    vector = json.loads(first)["embedding"]
    assert len(vector) == 4 and math.hypot(*vector) == pytest.approx(1.0)
    assert vector != found[0]["embedding"][:4]


def test_no_text_is_an_error(embedder):
    with pytest.raises(KvasirError, match="standard input is empty"):
        run("embed", embedder, given="")
