"""LFM3: its config, whose defaults are those of the published model."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.caches import State, Window
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.attention import Attention, HeadGatedAttention
from kvasir.layers.convolution import ShortConvolution
from kvasir.layers.rope import RopeScaling
from kvasir.models.lfm3 import Lfm3Config
from tests.models.families import config_of
from tests.models.oracle import dummy

FEW = {
    "vocab_size": 128000, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
    "max_position_embeddings": 128000,
}  # fmt: skip


def read(**changes: Any) -> Lfm3Config:
    return Lfm3Config.from_hf({**FEW, **changes})


def test_defaults_are_those_of_transformers(transformers):
    theirs = transformers.Lfm3Config()
    assert all(getattr(theirs, name) == value for name, value in FEW.items())
    for c in (read(), Lfm3Config.from_hf(theirs.to_dict())):
        kinds = [
            "conv" if convolves else "sliding_attention" if window else "full_attention"
            for convolves, window in zip(c.convolves, c.windows, strict=True)
        ]
        assert kinds == theirs.layer_types and max(c.windows) == theirs.sliding_window
        assert (c.inner, c.kv_heads, c.head_dim, c.taps) == (
            theirs.intermediate_size, theirs.num_key_value_heads, theirs.head_dim, theirs.conv_L_cache,
        )  # fmt: skip
        assert (c.sandwich, c.gated, c.tied, c.norm_eps) == (True, True, True, theirs.norm_eps)
        assert (c.rope_theta, c.rope_scaling) == (1e6, RopeScaling("proportional", 1.0, share=0.5))
        assert (c.local_theta, c.local_scaling) == (1e4, RopeScaling())


@pytest.mark.parametrize("change", [{"layer_types": ["conv"]}, {"conv_L_cache": 9}, {"sliding_window": 0}])
def test_bad_fields_are_refused(change):
    with pytest.raises(ModelFileError, match=next(iter(change))):
        read(**change)


def test_what_has_no_code_is_refused():
    with pytest.raises(UnsupportedModel, match="layer_types"):
        read(layer_types=["conv"] * 23 + ["mamba"])
    with pytest.raises(UnsupportedModel, match="mrope_section"):
        read(rope_parameters={"full_attention": {"rope_type": "default", "mrope_section": [1]}})


def test_each_layer_has_its_kind_and_cache():
    model = dummy(config_of("lfm3"))
    kinds = [type(layer.attn) for layer in model.layers]
    assert kinds == [ShortConvolution, ShortConvolution, HeadGatedAttention, ShortConvolution, HeadGatedAttention]
    assert model.cache_spec()[4] == Window(2, 16, window=24) and isinstance(model.cache_spec()[0], State)
    plain = dummy({**config_of("lfm3"), "use_attention_gate": False, "use_sandwich_norm": False})
    assert type(plain.layers[2].attn) is Attention and plain.layers[2].attn_post_norm is None
