"""OLMo Hybrid: its published config, and what a config without a rotary embedding looks like."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.errors import ModelFileError
from kvasir.layers.attention import Attention
from kvasir.layers.gated_delta import GatedDelta
from kvasir.models.olmo_hybrid import OlmoHybridConfig
from kvasir.ops.gated_delta import Heads
from tests.models.families import config_of
from tests.models.oracle import dummy

# allenai/Olmo-Hybrid-7B
PUBLISHED = {
    "architectures": ["OlmoHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": None, "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 3840, "initializer_range": 0.02,
    "intermediate_size": 11008, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "linear_a_log_max": 16.0, "linear_a_log_min": 0.0, "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4,
    "linear_dt_init_floor": 0.0001, "linear_dt_max": 0.1, "linear_dt_min": 0.001, "linear_key_head_dim": 96,
    "linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_value_head_dim": 192,
    "max_position_embeddings": 65536, "model_type": "olmo_hybrid", "num_attention_heads": 30, "num_hidden_layers": 32,
    "num_key_value_heads": 30, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"}, "tie_word_embeddings": False, "use_cache": True,
    "vocab_size": 100352,
}  # fmt: skip


def read(**changes: Any) -> OlmoHybridConfig:
    return OlmoHybridConfig.from_hf({**PUBLISHED, **changes})


def test_the_published_config_is_read():
    c = read()
    assert (c.num_layers, c.width, c.inner, c.heads, c.kv_heads, c.head_dim) == (32, 3840, 11008, 30, 30, 128)
    assert c.delta == Heads(30, 30, 96, 192) and (c.taps, c.strength) == (4, 2.0)
    assert c.recurrent == (True, True, True, False) * 8 and not any(c.rotates)


def test_defaults_are_those_of_transformers(transformers):
    theirs = transformers.OlmoHybridConfig(num_hidden_layers=3)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
    c = OlmoHybridConfig.from_hf({**{name: getattr(theirs, name) for name in names}, "num_hidden_layers": 3})
    assert c.delta == Heads(
        theirs.linear_num_key_heads, theirs.linear_num_value_heads, theirs.linear_key_head_dim,
        theirs.linear_value_head_dim,
    )  # fmt: skip
    assert [*c.recurrent] == [kind == "linear_attention" for kind in theirs.layer_types] == [True, True, False]
    assert all(c.rotates) and c.rope_theta == theirs.rope_parameters["rope_theta"]
    assert c.strength == 2.0 and theirs.linear_allow_neg_eigval


@pytest.mark.parametrize(
    ("changes", "rotates"),
    [
        ({"rope_parameters": None}, False),
        ({"rope_parameters": {"rope_theta": None}}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, True),
        ({"rope_parameters": {"rope_type": "default"}}, True),
    ],
)
def test_null_stands_for_no_rotary_embedding(changes, rotates):
    assert set(read(**changes).rotates) == {rotates}


@pytest.mark.parametrize("change", [{"linear_num_key_heads": 7}, {"linear_key_head_dim": 0}, {"layer_types": ["x"]}])
def test_bad_fields_are_refused(change):
    with pytest.raises(ModelFileError, match=r"linear|layer_types"):
        read(**change)


def test_norms_come_before_recurrent_layers_and_after_attention():
    layers = dummy(config_of("olmo-hybrid")).layers
    assert [type(layer.attn) for layer in layers] == [GatedDelta, Attention, GatedDelta, GatedDelta]
    assert [layer.attn_norm is None for layer in layers] == [False, True, False, False]
    assert [layer.attn_post_norm is None for layer in layers] == [True, False, True, True]
