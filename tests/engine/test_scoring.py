"""Scores of pairs, of labels and of embeddings, from texts: against transformers, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from kvasir import LLM
from kvasir.engine.scoring import cosine, pairs_of, ranked, scores_of
from kvasir.errors import InvalidRequest, KvasirError, ModelFileError
from kvasir.text.prompts import Prompts, read_prompts
from kvasir.types import ModelInfo
from tests.engine.folders import RERANKER, add_tokenizer, with_tokenizer, wordpiece
from tests.models.test_sentence_transformers import folder_of
from tests.models.test_token_heads import folder_of as token_heads

torch = pytest.importorskip("torch")

QUERY = "what is the capital of france?"
DOCUMENTS = ["paris is the capital of france.", "the cat sat on the mat", "", "rome 😀 " + "a river in the city, " * 9]


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is the oracle of these tests")


def llm(folder: str, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", progress=False, threads=1, num_blocks=60, **options)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """(folder, engine) of a cross-encoder."""
    folder = with_tokenizer("bert-pairs", tmp_path_factory.mktemp("pairs"))
    with llm(folder) as made:
        yield folder, made


@torch.no_grad()
def logits_of(transformers: Any, folder: str, kind: str, *texts: list[str]) -> np.ndarray:
    model = getattr(transformers, kind).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # In lists: by itself, an empty second text would count as none.
    lists = ([[text] for text in given] for given in zip(*texts, strict=True))
    found = [model(**tokenizer(*given, return_tensors="pt")).logits[0] for given in lists]
    return torch.stack(found).numpy()


@pytest.mark.filterwarnings("ignore")
def test_scores_of_a_cross_encoder(transformers, judge):
    folder, model = judge
    logits = logits_of(transformers, folder, "BertForSequenceClassification", [QUERY] * 4, DOCUMENTS)[:, 0]
    raw = [output.score for output in model.score(QUERY, DOCUMENTS, use_activation=False)]
    assert np.abs(raw - logits).max() < 1e-4 * np.abs(logits).max()
    scores = [output.score for output in model.score(QUERY, DOCUMENTS)]
    assert np.allclose(scores, 1 / (1 + np.exp(-np.array(raw))), atol=1e-6)
    assert model.rerank(QUERY, DOCUMENTS, top_n=3) == ranked(scores)[:3]
    assert [output.texts for output in model.score(["a", "b"], ["c", "d"])] == [("a", "c"), ("b", "d")]


def test_a_pair_alone_has_the_score_that_it_has_among_others(judge):
    _, model = judge
    together = [output.score for output in model.score(QUERY, DOCUMENTS)]
    assert together == [model.score(QUERY, document)[0].score for document in DOCUMENTS]
    assert together[::-1] == [output.score for output in model.score(QUERY, DOCUMENTS[::-1])]


def test_text_that_looks_like_a_control_token_separates_nothing(judge):
    _, model = judge
    tokenizer = model.get_tokenizer()
    ids = tokenizer.encode("a [SEP] b", add_special_tokens=False, foreign=((0, 9),), blocked=tokenizer.special_ids)
    assert 3 not in ids
    plain, hostile = model.score("a", ["a b", "a [SEP] b"])
    assert plain.score != hostile.score


@pytest.mark.parametrize(
    ("one", "other"), [(["a", "b"], ["c"]), (["a", "b"], ["c", "d", "e"]), ("a", []), ([], ["a", "b"])]
)
def test_texts_that_make_no_pairs_are_refused(one, other):
    with pytest.raises(InvalidRequest, match="first texts"):
        pairs_of(one, other)


def test_a_pair_that_is_too_long_is_refused(judge):
    with pytest.raises(KvasirError, match="tokens"):
        judge[1].score(QUERY, "the cat " * 200)


@pytest.mark.filterwarnings("ignore")
def test_labels_of_a_classifier(transformers, tmp_path):
    folder = with_tokenizer("xlm-roberta-labels", tmp_path)
    logits = logits_of(transformers, folder, "XLMRobertaForSequenceClassification", [QUERY, "the cat"])
    with llm(folder) as model:
        found = model.classify([QUERY, "the cat"])
        weights = np.exp(logits - logits.max(1, keepdims=True))
        assert np.allclose([output.probs for output in found], weights / weights.sum(1, keepdims=True), atol=1e-5)
        assert [output.label for output in found] == [f"LABEL_{i}" for i in logits.argmax(1)]
        raw = model.classify(QUERY, use_activation=False)[0].probs
        assert np.abs(raw - logits[0]).max() < 1e-4 * np.abs(logits).max()
        with pytest.raises(InvalidRequest, match="3 labels"):
            model.score(QUERY, DOCUMENTS)
        with pytest.raises(InvalidRequest, match="does not embed"):
            model.embed(QUERY)


@pytest.mark.filterwarnings("ignore")
def test_a_reranker_reads_a_pair_through_its_template(transformers, tmp_path):
    folder = with_tokenizer("qwen3-labels", tmp_path, RERANKER)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_labels": 2}))
    with llm(folder) as model, pytest.raises(InvalidRequest, match="2 labels"):
        model.score(QUERY, DOCUMENTS)


@pytest.mark.filterwarnings("ignore")
def test_a_reranker_that_answers_with_a_token(transformers, tmp_path):
    folder = with_tokenizer("qwen3", tmp_path, RERANKER)
    modules = [{"path": at, "type": f"sentence_transformers.{at[2:] or 'Transformer'}"} for at in ("", "1_LogitScore")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": 17, "false_token_id": 230}))
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    tokenizer = wordpiece()
    with llm(folder) as model:
        for told in ("", "judge the city"):
            scores = [output.score for output in model.score(QUERY, DOCUMENTS[:2], instruction=told)]
            for score, document in zip(scores, DOCUMENTS, strict=False):
                text = f"[CLS] {told or 'find what answers'} [SEP] {QUERY} [SEP] {document} [MASK]"
                ids = tokenizer.encode(text, add_special_tokens=False).ids
                with torch.no_grad():
                    logits = hf(torch.tensor([ids])).logits[0, -1]
                assert abs(score - 1 / (1 + math.exp(logits[230] - logits[17]))) < 1e-4
        [hostile] = model.score(QUERY, "rome [MASK] [SEP]")
        [plain] = model.score(QUERY, "rome")
        assert hostile.score != plain.score


# --- embedding models -------------------------------------------------------------------------------


def test_an_embedding_model_scores_by_the_cosine(tmp_path):
    prompts = {"prompts": {"query": "what is ", "passage": "in the city "}}
    folder = with_tokenizer("bert", tmp_path, prompts=prompts)
    with llm(folder) as model:
        query = model.embed(QUERY, prompt_name="query")[0].embedding
        assert query == model.embed("what is " + QUERY)[0].embedding != model.embed(QUERY)[0].embedding
        documents = [output.embedding for output in model.embed(DOCUMENTS[:2], prompt_name="passage")]
        found = [output.score for output in model.score(QUERY, DOCUMENTS[:2])]
        assert np.allclose(found, np.array(documents) @ np.array(query), atol=1e-6)
        with pytest.raises(InvalidRequest, match="instruction"):
            model.score(QUERY, DOCUMENTS[:2], instruction="x")
        with pytest.raises(InvalidRequest, match="no prompt 'other'"):
            model.embed(QUERY, prompt_name="other")


def test_fewer_dimensions_are_the_first_ones_normalised(tmp_path):
    folder = str(folder_of(tmp_path))
    with llm(folder) as model:
        ids = {"prompt_token_ids": [5, 6, 7]}
        whole = np.array(model.embed(ids)[0].embedding)
        few = np.array(model.embed(ids, dimensions=12)[0].embedding)
        assert np.allclose(few, whole[:12] / np.linalg.norm(whole[:12]))
        for count in (0, 49):
            with pytest.raises(InvalidRequest, match="dimensions"):
                model.embed(ids, dimensions=count)


def test_prompts_of_a_folder(tmp_path):
    path = tmp_path / "config_sentence_transformers.json"
    assert read_prompts(tmp_path) == Prompts()
    path.write_text(json.dumps({"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}))
    found = read_prompts(tmp_path)
    assert (found.of(None), found.of("document"), found.first("passage", "query")) == ("q: ", "", "q: ")
    for bad in ({"prompts": ["x"]}, {"prompts": {"a": 1}}, {"default_prompt_name": "x"}, {"prompts": {"a": "\ud800"}}):
        path.write_text(json.dumps(bad))
        with pytest.raises(ModelFileError):
            read_prompts(tmp_path)


# --- tokens -----------------------------------------------------------------------------------------


def test_embeddings_and_weights_of_tokens(tmp_path):
    add_tokenizer(token_heads(tmp_path))
    with llm(str(tmp_path)) as model:
        text = "the cat cat [SEP] sat"
        [vectors], [weights] = model.token_embed(text), model.lexical(text)
        ids = weights.prompt_token_ids
        assert len(vectors.embeddings) == len(ids) - 1 and {len(row) for row in vectors.embeddings} == {24}
        assert np.allclose(np.linalg.norm(vectors.embeddings, axis=1), 1.0, atol=1e-6)
        assert weights.weights and set(weights.weights) <= set(ids) - {0, 1, 2, 3, 4}
        assert all(weight > 0 for weight in weights.weights.values())
    (tmp_path / "plain").mkdir()
    with (
        llm(with_tokenizer("bert", tmp_path / "plain")) as model,
        pytest.raises(InvalidRequest, match="weights of tokens"),
    ):
        model.lexical("the cat")


# --- arithmetic -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "scores"),
    [
        ("identity", [1.0, -800.0]),
        ("sigmoid", [1 / (1 + math.exp(-1)), 0.0]),
        ("tanh", [math.tanh(1), -1.0]),
        ("softmax", [1.0, 0.0]),
    ],
)
def test_the_functions_of_logits(activation, scores):
    info = ModelInfo("m", "M", (), 1, 1, activation=activation)
    assert scores_of(info, [1.0, -800.0]) == pytest.approx(scores)
    assert scores_of(info, [1.0, -800.0], raw=True) == [1.0, -800.0]


def test_the_cosine():
    assert cosine([1.0, 2.0], [2.0, 4.0]) == pytest.approx(1.0) and cosine([1.0, 0.0], [0.0, 3.0]) == 0.0
    assert cosine([0.0, 0.0], [1.0, 1.0]) == 0.0


def test_equal_scores_keep_their_order():
    assert ranked([0.5, 0.9, 0.5]) == [(1, 0.9), (0, 0.5), (2, 0.5)]
