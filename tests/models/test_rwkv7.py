"""RWKV-7 against a decoder written from the paper (rwkv7_plain.py): transformers has no such model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvasir.caches import State  # noqa: E402
from kvasir.errors import ModelFileError, UnsupportedModel  # noqa: E402
from kvasir.models.registry import model_class_for  # noqa: E402
from kvasir.models.rwkv7 import CONTEXT, Rwkv7Config  # noqa: E402
from kvasir.ops.wkv import WkvSizes  # noqa: E402
from tests.models.driver import logits_of  # noqa: E402
from tests.models.oracle import SENSITIVITY, TOLERANCE, ours, random_ids  # noqa: E402
from tests.models.rwkv7_plain import PlainRwkv7, random_weights  # noqa: E402

TINY: dict[str, Any] = {
    "model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"], "hidden_size": 60, "num_hidden_layers": 3,
    "head_dim": 20, "intermediate_size": 96, "decay_low_rank_dim": 12, "a_low_rank_dim": 8, "v_low_rank_dim": 5,
    "gate_low_rank_dim": 16, "vocab_size": 96, "hidden_act": "sqrelu", "norm_eps": 1e-3,
}  # fmt: skip
# RWKV/RWKV7-Goose-World3-1.5B-HF
PUBLISHED: dict[str, Any] = {
    "a_low_rank_dim": 96, "architectures": ["RWKV7ForCausalLM"], "attn": None, "attn_mode": "chunk", "auto_map": {
        "AutoConfig": "modeling_rwkv7.RWKV7Config", "AutoModel": "modeling_rwkv7.RWKV7Model",
        "AutoModelForCausalLM": "modeling_rwkv7.RWKV7ForCausalLM",
    },
    "bos_token_id": 0, "decay_low_rank_dim": 96, "eos_token_id": 0, "fuse_cross_entropy": True, "fuse_norm": False,
    "gate_low_rank_dim": 256, "head_dim": 64, "hidden_act": "sqrelu", "hidden_ratio": 4.0, "hidden_size": 2048,
    "initializer_range": 0.006, "intermediate_size": 8192, "max_position_embeddings": 2048, "model_type": "rwkv7",
    "norm_bias": True, "norm_eps": 1e-05, "norm_first": True, "num_heads": 32, "num_hidden_layers": 24,
    "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.48.0", "use_cache": True,
    "v_low_rank_dim": 64, "value_dim": [2048] * 24, "vocab_size": 65536,
}  # fmt: skip
IDS = random_ids(50, 96)


def model_of(config: dict[str, Any], weights: dict[str, np.ndarray]) -> Any:
    return ours(config, {name: torch.from_numpy(array) for name, array in weights.items()})


def distance(found: Any, expected: np.ndarray) -> float:
    return float(np.abs(found.numpy() - expected).max() / np.abs(expected).max())


WITHOUT = {"tie_word_embeddings": True, "norm_bias": False, "norm_first": False, "head_dim": 12}


@pytest.mark.parametrize("change", [{}, WITHOUT], ids=["whole", "without"])
def test_rwkv7_logits_agree_with_the_paper(change, exact_machine):
    config = {**TINY, **change}
    weights = random_weights(config)
    expected = PlainRwkv7(config, weights).logits(IDS)
    assert distance(logits_of(model_of(config, weights), IDS, chunks=[19, 1, 14]), expected) < TOLERANCE


def test_dummy_shares_of_the_first_layer_are_ignored(exact_machine):
    weights = random_weights(TINY)
    expected = logits_of(model_of(TINY, weights), IDS)
    name = "model.layers.{}.attn.v_lora.lora.0.weight"
    dummies = {name.format(0): weights[name.format(1)] * 3}
    assert torch.equal(logits_of(model_of(TINY, {**weights, **dummies}), IDS), expected)


@pytest.mark.parametrize("change", [{"norm_eps": 0.5}, {"norm_first": False}, {"head_dim": 12}], ids=str)
def test_each_setting_changes_the_logits(change, exact_machine):
    weights = random_weights(TINY)
    expected = PlainRwkv7(TINY, weights).logits(IDS)
    if "head_dim" in change:
        weights |= {n: w.reshape(5, 12) for n, w in weights.items() if n.endswith("r_k")}
    kept = {n: w for n, w in weights.items() if change.get("norm_first", True) or "pre_norm" not in n}
    assert distance(logits_of(model_of({**TINY, **change}, kept), IDS), expected) > SENSITIVITY


@pytest.mark.few(5)
@pytest.mark.parametrize("part", [f"attn.x_{p}" for p in "rwkvag"] + ["attn.k_k", "attn.k_a", "attn.r_k", "ffn.x_k"])
def test_each_vector_changes_the_logits(part, exact_machine):
    weights = random_weights(TINY)
    expected = PlainRwkv7(TINY, weights).logits(IDS)
    name = f"model.layers.1.{part}"
    changed = {**weights, name: weights[name] + 3}
    assert distance(logits_of(model_of(TINY, changed), IDS), expected) > SENSITIVITY


def test_the_published_config_is_read():
    c = Rwkv7Config.from_hf(PUBLISHED)
    assert (c.vocab_size, c.width, c.inner, c.num_layers, c.tied) == (65536, 2048, 8192, 24, False)
    assert c.wkv == WkvSizes(32, 64, 64e-5) and c.ranks == {"w": 96, "a": 96, "v": 64, "g": 256}
    assert c.context_length == CONTEXT and c.norm_bias and c.norm_first


def test_absent_sizes_follow_from_the_width():
    absent = ("intermediate_size", "hidden_ratio", *(name for name in PUBLISHED if "low_rank" in name), "value_dim")
    c = Rwkv7Config.from_hf({name: value for name, value in PUBLISHED.items() if name not in absent})
    assert c.inner == 8192 and c.ranks == {"w": 128, "a": 128, "v": 64, "g": 224}


def test_published_files_count_heads_wrongly():
    assert Rwkv7Config.from_hf({**PUBLISHED, "num_heads": 40}).wkv.heads == 32
    assert Rwkv7Config.from_hf({**PUBLISHED, "num_heads": 16, "head_dim": None}).wkv == WkvSizes(32, 64, 64e-5)


def test_each_layer_has_two_caches():
    model = model_of(TINY, random_weights(TINY))
    spec = model.cache_spec()
    assert spec[:3] == (State((3, 20, 20), 5 * 60, 1),) * 3 and spec[3:] == (State((0,), 60, 1),) * 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 0}, "hidden_size"), ({"head_dim": 3}, "head"), ({"head_dim": "64"}, "head_dim"),
        ({"hidden_ratio": -1}, "hidden_ratio"), ({"gate_low_rank_dim": 0}, "gate_low_rank_dim"),
        ({"norm_bias": 1}, "norm_bias"), ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
    ],
)  # fmt: skip
def test_bad_fields_are_refused(change, field):
    with pytest.raises(ModelFileError, match=field):
        Rwkv7Config.from_hf({**PUBLISHED, **change})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"attn": {"layers": [3], "num_heads": 8}}, "attn"), ({"hidden_act": "relu"}, "hidden_act"),
        ({"value_dim": [1024] * 24}, "value_dim"), ({"attention_bias": True}, "attention_bias"),
    ],
)  # fmt: skip
def test_what_has_no_code_is_refused(change, field):
    with pytest.raises(UnsupportedModel, match=field):
        Rwkv7Config.from_hf({**PUBLISHED, **change})


@pytest.mark.parametrize("kind", ["rwkv", "rwkv5", "rwkv6", "rwkv6qwen2"])
def test_other_versions_are_refused_by_name(kind):
    with pytest.raises(UnsupportedModel, match=rf"{kind}\b(.|\n)*rwkv7"):
        model_class_for({"model_type": kind, "architectures": ["X"]})
