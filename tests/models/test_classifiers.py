"""Classifiers against transformers: equal logits, and what their configs say about labels and scores."""

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.pooling import Pooling, pooling_of
from kvasir.types import Task
from tests.models.driver import make_cache, step
from tests.models.families import config_of
from tests.models.hf import randomized
from tests.models.oracle import SENSITIVITY, TOLERANCE, ours, random_ids, state_of
from tests.models.test_encoders import ENCODERS

_BERT = {**ENCODERS["roberta"], "model_type": "bert", "pad_token_id": 0}
_MODERN, _EURO = ENCODERS["modernbert"], ENCODERS["eurobert"]
_WITH_HEADS = (
    *("roberta", "xlm-roberta", "camembert", "electra", "distilbert", "jina-v3", "nomic", "gte", "mpnet"),
    *("deberta-v3", "deberta-v2", "albert"),
)
CLASSIFIERS: dict[str, dict[str, Any]] = {
    **{name: ENCODERS[name] for name in _WITH_HEADS},
    "bert": _BERT,
    "modernbert": _MODERN,
    "modernbert-mean": {**_MODERN, "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True},
    "modernbert-silu": {**_MODERN, "classifier_activation": "silu"},
    "eurobert-late": _EURO,
    "eurobert-bos": {**_EURO, "classifier_pooling": "bos"},
    "eurobert-mean": {**_EURO, "classifier_pooling": "mean"},
    **{name: config_of(name) for name in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")},
}
LABELS = 3
TOKENS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "deberta-v3", "albert")


@cache
def oracle(transformers: Any, name: str, kind: str = "SequenceClassification") -> Any:
    config = deepcopy(CLASSIFIERS[name])
    config = transformers.AutoConfig.for_model(config.pop("model_type"), num_labels=LABELS, **config)
    auto = getattr(transformers, f"AutoModelFor{kind}")
    return randomized(auto.from_config(config, attn_implementation="eager"))


def loaded(model: Any, **changes: Any) -> Any:
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return ours(config | changes, state_of(model))


def hidden(model: Any, ids: list[int]) -> np.ndarray:
    cache = make_cache(model, blocks=9, fill=float("nan"))
    return step(model, cache, [(ids, 0, np.arange(1, 9, dtype=np.int32))], causal=not model.bidirectional)[0].numpy()


def logits_of(model: Any, ids: list[int], task: Task = Task.CLASSIFY) -> np.ndarray:
    return model.pool(hidden(model, ids), task)


def ids_of(count: int) -> list[int]:
    return [4 + i for i in random_ids(count, 90, seed=count)]


@torch.no_grad()
def expected(model: Any, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids])).logits[0].numpy()


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.few(10)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_logits_agree(transformers, name):
    hf = oracle(transformers, name)
    model = loaded(hf)
    assert model.tasks == (Task.CLASSIFY,) and len(model.config.pooling.labels) == LABELS
    for count in (1, 2, 33, 100):
        found = logits_of(model, ids_of(count))
        assert found.dtype == np.float32 and distance(found, expected(hf, ids_of(count))) < TOLERANCE


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TOKENS)
def test_logits_of_each_token_agree(transformers, name):
    hf = oracle(transformers, name, "TokenClassification")
    model = loaded(hf)
    assert model.tasks == (Task.TOKEN_CLASSIFY,)
    for count in (1, 33, 100):
        found = logits_of(model, ids_of(count), Task.TOKEN_CLASSIFY)
        assert found.shape == (count, LABELS) and distance(found, expected(hf, ids_of(count))) < TOLERANCE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("modernbert", {"classifier_pooling": "mean"}),
        ("modernbert", {"classifier_activation": "relu"}),
        ("modernbert", {"norm_eps": 0.5}),
        ("eurobert-bos", {"classifier_pooling": "mean"}),
        ("eurobert-bos", {"classifier_pooling": "late"}),
    ],
)
def test_every_field_of_a_head_moves_the_logits(transformers, name, change):
    hf, ids = oracle(transformers, name), ids_of(50)
    assert distance(logits_of(loaded(hf, **change), ids), logits_of(loaded(hf), ids)) > SENSITIVITY


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert-mean", "eurobert-late", "qwen3"])
def test_every_weight_of_a_head_moves_the_logits(transformers, name):
    hf, ids = oracle(transformers, name), ids_of(50)
    model, state = loaded(hf), state_of(hf)
    before = logits_of(model, ids)
    heads = [
        k for k in state if k.startswith(("classifier", "score", "head.", "dense", "pre_classifier", "bert.pooler"))
    ]
    assert heads
    for key in heads:
        tensor = state[key]
        changed = state | {key: tensor.flip(0 if len(tensor) > 1 else 1)}
        config = {**hf.config.to_dict(), "architectures": [type(hf).__name__]}
        assert distance(logits_of(ours(config, changed), ids), before) > 10 * TOLERANCE, key


@pytest.mark.filterwarnings("ignore")
def test_a_classifier_without_its_tensors_is_refused(transformers):
    hf = oracle(transformers, "roberta")
    state = {k: v for k, v in state_of(hf).items() if not k.startswith("classifier")}
    with pytest.raises(ModelFileError, match=r"classifier\.dense"):
        ours({**hf.config.to_dict(), "architectures": ["RobertaForSequenceClassification"]}, state)


@pytest.mark.filterwarnings("ignore")
def test_a_decoder_without_logits_embeds_alone(transformers):
    hf = randomized(transformers.AutoModel.from_config(oracle(transformers, "qwen3").config))
    model = loaded(hf)
    assert model.tasks == (Task.EMBED,) and model.head is None
    rows = hf(torch.tensor([ids_of(20)])).last_hidden_state[0, -1].detach().numpy()
    assert distance(model.pool(hidden(model, ids_of(20))), rows / np.linalg.norm(rows)) < TOLERANCE


# --- configs ----------------------------------------------------------------------------------------


def read(**fields: Any) -> Pooling:
    return pooling_of({"architectures": ["BertForSequenceClassification"], **fields}, Pooling("cls"))


def test_labels_are_read_in_order():
    assert read(id2label={"1": "no", "0": "yes"}).labels == ("yes", "no")
    assert read(num_labels=1).labels == ("LABEL_0",)
    assert read().labels == ("LABEL_0", "LABEL_1")
    for labels in ({"0": "a", "2": "b"}, {"0": 1}, {}, ["a"]):
        with pytest.raises(ModelFileError, match="id2label"):
            read(id2label=labels)


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"num_labels": 2}, "softmax"),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "identity"),
        ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
        ({"num_labels": 2, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_the_function_of_the_logits(fields, activation):
    assert read(**fields).activation == activation


@pytest.mark.parametrize("name", ["os.system", "torch.nn.modules.activation.PReLU", 7, ""])
def test_an_unknown_function_is_refused(name):
    with pytest.raises(UnsupportedModel, match="activation"):
        read(sentence_transformers={"activation_fn": name} if name else {"activation_fn": "x"})


def test_a_head_without_code_is_refused():
    config = {**config_of("llama"), "architectures": ["LlamaForTokenClassification"]}
    with pytest.raises(UnsupportedModel, match="LlamaForTokenClassification"):
        ours(config, {})
