"""Decoders whose tokens attend to the whole text: equal to transformers with a mask that hides nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvasir.errors import UnsupportedModel
from kvasir.models.gpt2 import GPT2Config
from kvasir.models.registry import model_class_for
from kvasir.types import Task
from tests.models.families import config_of
from tests.models.hf import randomized
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, ours, state_of
from tests.models.test_encoders import hidden_of, ids_of

FAMILIES = ("llama", "qwen2", "qwen3")
OPEN = {"sliding_window": None, "use_sliding_window": False, "layer_types": None}


def made(transformers: Any, name: str, auto: str = "AutoModel", **fields: Any) -> Any:
    config = {**config_of(name), **OPEN, "vocab_size": 97, **fields}
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    return randomized(getattr(transformers, auto).from_config(config, attn_implementation="eager"))


@torch.no_grad()
def expected(hf: Any, ids: list[int]) -> Any:
    return hf(torch.tensor([ids]), attention_mask=torch.zeros(1, 1, len(ids), len(ids)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_rows_agree(transformers, name):
    hf = made(transformers, name)
    model = ours(hf.config.to_dict() | {"is_causal": False}, state_of(hf))
    assert model.bidirectional and model.tasks == (Task.EMBED, Task.TOKEN_EMBED)
    for count in (1, 40):
        rows = expected(hf, ids_of(count)).last_hidden_state[0]
        assert distance(hidden_of(model, [ids_of(count)])[0], rows) < TOLERANCE
    causal = hf(torch.tensor([ids_of(40)])).last_hidden_state[0].detach()
    assert distance(hidden_of(model, [ids_of(40)])[0], causal) > SENSITIVITY


@pytest.mark.filterwarnings("ignore")
def test_nvidias_llama_bidirec_agrees(transformers):
    """The embedding model is a Llama without its head; the reranker scores the mean row."""
    hf = made(transformers, "llama", "AutoModelForSequenceClassification", num_labels=1)
    config = {**hf.config.to_dict(), "model_type": "llama_bidirec", "pooling": "avg", "temperature": 1.0}
    ids = ids_of(30)
    rows = expected(hf.model, ids).last_hidden_state[0]
    names = {"architectures": ["LlamaBidirectionalForSequenceClassification"]}
    model = ours(config | names, state_of(hf))
    assert model.tasks == (Task.CLASSIFY,)
    found = hidden_of(model, [ids])[0]
    assert distance(found, rows) < TOLERANCE
    score = (hf.score.weight @ rows.mean(0)).detach().numpy()
    assert np.abs(model.pool(found.numpy(), Task.CLASSIFY) - score).max() < TOLERANCE * np.abs(score).max()
    names = {"architectures": ["LlamaBidirectionalModel"], "temperature": 0.02}
    embedding = ours(config | names, {k: v for k, v in state_of(hf).items() if not k.startswith("score")})
    assert torch.equal(hidden_of(embedding, [ids])[0], found) and embedding.config.pooling.kind == "mean"


@pytest.mark.parametrize(
    "fields",
    [
        {**config_of("gemma2"), "is_causal": False},
        {**config_of("mistral"), "is_causal": False, "sliding_window": 8},
        {**config_of("llama"), "model_type": "llama_bidirec", "pooling": "weighted"},
        {
            **config_of("llama"), "model_type": "llama_bidirec", "pooling": "avg", "temperature": 0.5,
            "architectures": ["LlamaBidirectionalForSequenceClassification"],
        },
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(fields):
    with pytest.raises(UnsupportedModel):
        kind = model_class_for(fields)
        kind(kind.Config.from_hf(fields))


def test_a_false_is_causal_is_never_ignored():
    with pytest.raises(UnsupportedModel, match="is_causal"):
        GPT2Config.from_hf({"model_type": "gpt2", "is_causal": False})
