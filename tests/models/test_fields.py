"""Reading configs: bounds of the files, types and ranges of the fields, nothing that matters ignored."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.errors import KvasirError, ModelFileError, UnsupportedModel
from kvasir.models.config import (
    Fields,
    read_generation_config,
    read_hf_config,
    read_layer_windows,
)
from kvasir.models.rope import KINDS, RopeScaling, read_rope

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


# --- files ------------------------------------------------------------------------------------------


def test_a_config_is_read_from_its_folder_or_by_its_own_path(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_hf_config(tmp_path) == read_hf_config(tmp_path / "config.json") == {"model_type": "llama"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2]", '"text"', '{"a": 1} x', '{"a": ' + "9" * 5000 + "}", "\xff\xfe".encode("latin-1")],
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_hf_config(tmp_path)


def test_an_absent_config_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_hf_config(tmp_path)


# --- fields -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 11, 5.0, "5", True, [5], {"a": 5}])
def test_an_integer_out_of_range_or_of_another_type_is_refused(value):
    with pytest.raises(ModelFileError, match=r"num_hidden_layers.*\[1, 10\]"):
        Fields({"num_hidden_layers": value}).integer("num_hidden_layers", 1, 10)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 2.0, True, "1"])
def test_a_number_out_of_range_is_refused(value):
    with pytest.raises(ModelFileError, match="rms_norm_eps"):
        Fields({"rms_norm_eps": value}).number("rms_norm_eps", 0.0, 1.0)


def test_null_and_absent_take_the_default_and_without_one_are_refused():
    f = Fields({"a": None})
    assert (f.integer("a", 1, 2, 2), f.integer("b", 1, 2, 1), f.flag("c", True)) == (2, 1, True)
    for name in "ab":
        with pytest.raises(ModelFileError, match=rf"\b{name}\b.* missing"):
            f.integer(name, 1, 2)


def test_a_choice_outside_the_options_is_a_missing_feature():
    with pytest.raises(UnsupportedModel, match=r"hidden_act.*'relu6'.*silu.*gelu"):
        Fields({"hidden_act": "relu6"}).choice("hidden_act", ("silu", "gelu"))


@pytest.mark.parametrize(
    "name",
    [
        *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "logit_scale"),
        *("sliding_window", "use_sliding_window", "layer_types", "rope_scaling", "partial_rotary_factor"),
        *("embedding_multiplier", "residual_multiplier", "num_local_experts", "use_qk_norm", "mlp_bias"),
        *("attention_bias", "clip_qkv", "no_rope_layers", "alibi", "use_parallel_residual", "hidden_act"),
        *("attention.scale", "expert_count"),
    ],
)
def test_an_unread_field_of_the_arithmetic_is_refused_by_name(name):
    with pytest.raises(UnsupportedModel, match=name):
        Fields({name: 2.0}).finish()
    Fields({name: None}).finish()
    read = Fields({name: 2.0})
    read.get(name)
    read.finish()


@pytest.mark.parametrize(
    "name",
    [
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "initializer_range", "torch_dtype", "dtype"),
        *("_name_or_path", "_attn_implementation", "transformers_version", "use_cache", "pretraining_tp"),
        *("bos_token_id", "id2label", "unsloth_version", "max_length", "summary_type", "auto_map"),
    ],
)
def test_training_bookkeeping_and_generation_are_ignored(name):
    Fields({name: 2.0}).finish()


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes"])
def test_a_quantized_checkpoint_is_refused_by_its_method(method):
    with pytest.raises(UnsupportedModel, match=method):
        Fields({"quantization_config": {"quant_method": method, "bits": 4}}).finish()


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "attn_scale", "eos_token_id", "layer_types"]), JSON_VALUES))
def test_any_json_gives_a_value_or_our_error(values):
    for read in (
        lambda f: f.integer("a", 0, 9),
        lambda f: f.number("a", 0, 9),
        lambda f: f.choice("a", ("x",)),
        lambda f: read_layer_windows(f, 2),
        lambda f: f.finish(),
    ):
        try:
            read(Fields(values))
        except KvasirError as error:
            assert len(str(error)) < 400


# --- windows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({}, (0, 0, 0)),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, (0, 0, 0)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (0, 8, 8)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0)),
        (
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, 0, 8),
        ),
    ],
)
def test_windows_per_layer(config, windows):
    f = Fields(config)
    assert read_layer_windows(f, 3) == windows
    f.finish()


def test_layer_types_of_another_length_or_kind_are_refused():
    with pytest.raises(ModelFileError, match="layer_types"):
        read_layer_windows(Fields({"layer_types": ["full_attention"]}), 2)
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        read_layer_windows(Fields({"layer_types": ["linear_attention"]}), 1)


# --- rope -------------------------------------------------------------------------------------------

LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

LONGROPE = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 64.0]}


def rope(config: dict, max_position: int = 4096) -> tuple[float, RopeScaling]:
    f = Fields(config)
    found = read_rope(f, max_position)
    f.finish()
    return found


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16},
        {"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": 1024},
    ],
)
def test_old_and_new_spelling_give_the_same(scaling):
    new = {"rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": 5e5}}
    old = {"rope_scaling": scaling, "rope_theta": 5e5}
    older = {
        "rope_theta": 5e5,
        "rope_scaling": scaling
        and {**{k: v for k, v in scaling.items() if k != "rope_type"}, "type": scaling["rope_type"]},
    }
    assert rope(new) == rope(old) == rope(older)
    assert rope(new)[0] == 5e5


def test_without_rope_fields_the_defaults_hold():
    assert rope({}) == (10000.0, RopeScaling())


def test_yarn_takes_its_published_defaults():
    _, scaling = rope({"rope_scaling": {"type": "yarn", "factor": 4.0}}, max_position=32768)
    assert scaling.original_max_position == 32768 and scaling.context_length(32768) == 131072
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32.0, 1.0, True)
    assert scaling.attention_factor == 0.1 * math.log(4.0) + 1.0


def test_yarn_reads_the_factor_from_the_lengths_when_it_is_not_given():
    _, scaling = rope({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1024}})
    assert scaling.factor == 4.0 and scaling.context_length(4096) == 4096


def test_yarn_weighs_both_mscales():
    fields = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    _, scaling = rope({"rope_scaling": fields})
    assert scaling.attention_factor == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))


def test_longrope_keeps_the_long_factors_if_the_context_exceeds_the_original():
    fields = {"rope_scaling": {"type": "su", **LONGROPE}, "original_max_position_embeddings": 1024}
    _, scaling = rope(fields, max_position=131072)
    assert (scaling.kind, scaling.factors, scaling.long_factors) == ("longrope", (1.0, 1.5), (2.0, 64.0))
    assert scaling.context_length(131072) == 131072 and scaling.short_until == 1024
    assert scaling.served(1024).factors == (1.0, 1.5) and scaling.served(1025).factors == (2.0, 64.0)
    assert scaling.attention_factor == math.sqrt(1 + math.log(128) / math.log(1024))
    short = rope(fields, max_position=1024)[1]
    assert (short.attention_factor, short.long_factors, short.short_until) == (1.0, (), 0)


def test_context_lengths():
    assert rope({"rope_scaling": {"type": "linear", "factor": 4.0}})[1].context_length(4096) == 16384
    assert rope({"rope_scaling": {"type": "dynamic", "factor": 4.0}})[1].context_length(4096) == 4096
    assert rope({"rope_scaling": {"type": "llama3", **LLAMA3}})[1].context_length(131072) == 131072


@pytest.mark.parametrize("kind", ["mrope", "proportional", "ntk", 7])
def test_a_kind_without_code_is_refused_by_name(kind):
    with pytest.raises(UnsupportedModel, match=str(kind)):
        rope({"rope_scaling": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 0.5}},
        {"rope_scaling": {"type": "factors", "factors": [0.0, 1.0]}},
        {"rope_scaling": {"type": "factors", "factors": []}},
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        {"rope_scaling": {"type": "longrope", **LONGROPE, "short_factor": [0.0]}},
        {"rope_scaling": {"type": "longrope", **LONGROPE, "long_factor": None}},
        {"rope_scaling": [1, 2]},
        {"rope_theta": -1.0},
        {"rope_theta": "10000"},
    ],
)
def test_values_that_cannot_be_are_refused(config):
    with pytest.raises(ModelFileError):
        rope(config)


@pytest.mark.parametrize(
    "config",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 3]}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **LONGROPE}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
)
def test_unsupported_rope_scaling_is_refused(config):
    with pytest.raises(UnsupportedModel):
        rope(config)


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(["rope_type", "factor", "mscale", "factors", "truncate"]), JSON_VALUES),
    st.sampled_from(KINDS),
)
def test_any_rope_scaling_gives_finite_numbers_or_our_error(values, kind):
    try:
        _, scaling = rope({"rope_scaling": {"rope_type": kind, **values}})
    except KvasirError:
        return
    assert math.isfinite(scaling.factor) and 0 < scaling.attention_factor < math.inf


# --- generation -------------------------------------------------------------------------------------


def generation(tmp_path, values: dict | None, config: dict | None = None):
    if values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return read_generation_config(tmp_path, config)


def test_generation_config_wins_over_the_models_own_eos(tmp_path):
    found = generation(tmp_path, {"eos_token_id": [7, 8, 7], "temperature": 0.6, "top_k": 20}, {"eos_token_id": 2})
    assert found.eos_ids == (7, 8)
    assert found.sampling == {"temperature": 0.6, "top_k": 20} and type(found.sampling["top_k"]) is int


def test_without_it_the_models_eos_holds(tmp_path):
    assert generation(tmp_path, None, {"eos_token_id": 2}).eos_ids == (2,)
    assert generation(tmp_path, {"eos_token_id": None}, {"eos_token_id": [3]}).eos_ids == (3,)
    assert generation(tmp_path, None).eos_ids == ()


def test_suppressed_ids_are_read_whether_or_not_it_samples(tmp_path):
    for sample in (True, False):
        assert generation(tmp_path, {"do_sample": sample, "suppress_tokens": [5, 7, 5]}).suppressed == (5, 7)
    assert generation(tmp_path, {"suppress_tokens": None}).suppressed == ()
    with pytest.raises(ModelFileError, match="suppress_tokens"):
        generation(tmp_path, {"suppress_tokens": [-1]})


def test_ids_that_are_suppressed_first_are_refused_by_name(tmp_path):
    for ids in (220, [220, 50257]):
        with pytest.raises(UnsupportedModel, match=r"begin_suppress_tokens is .*220"):
            generation(tmp_path, {"do_sample": False, "begin_suppress_tokens": ids})
    assert generation(tmp_path, {"begin_suppress_tokens": None}) == generation(tmp_path, {"begin_suppress_tokens": []})
    with pytest.raises(ModelFileError, match="begin_suppress_tokens"):
        generation(tmp_path, {"begin_suppress_tokens": ["x"]})


def test_do_sample_false_voids_the_sampling_values(tmp_path):
    assert generation(tmp_path, {"do_sample": False, "temperature": 0.6}).sampling == {}


@pytest.mark.parametrize("eos", [-1, 1.5, "2", [2, -1], [True], list(range(65)), 1 << 40])
def test_ids_that_cannot_be_are_refused(tmp_path, eos):
    with pytest.raises(ModelFileError, match="eos_token_id"):
        generation(tmp_path, {"eos_token_id": eos})


def test_sampling_out_of_range_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match="top_p"):
        generation(tmp_path, {"top_p": 1.5})
