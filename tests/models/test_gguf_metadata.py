"""GGUF metadata as a Hugging Face config: each key by itself."""

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvasir.errors import KvasirError, ModelFileError, UnsupportedModel
from kvasir.models import (
    gguf_decoders,
    gguf_dflash,
    gguf_eagle3,
    gguf_encoders,
    gguf_further,
    gguf_gemma,
    gguf_kimi,
    gguf_latent,
    gguf_lfm2,
    gguf_llamas,
    gguf_rwkv,
    gguf_state_spaces,
    gguf_step35,
)
from kvasir.models.config import Fields
from kvasir.models.gguf_config import hf_config_from_gguf
from kvasir.models.gguf_names import FAMILIES
from kvasir.models.registry import model_class_for
from kvasir.models.rope import read_rope
from kvasir.weights.mapped import TensorInfo
from tests._shared import need

ROWS, HIDDEN, CONTEXT = 48, 32, 64


@dataclass
class Tensors:
    """A source of given arrays: what a GGUF file's tensors look like to the config reader."""

    arrays: dict[str, np.ndarray]

    def names(self):
        return self.arrays.keys()

    def info(self, name):
        array = self.arrays[name]
        return TensorInfo(name, array.shape, "F32", array.nbytes, need())

    def array(self, name):
        return self.arrays[name]


def metadata(architecture: str, **changes) -> dict:
    values = {
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "block_count": 1,
        "feed_forward_length": 80,
        "attention.head_count": 4,
    }
    if architecture == "qwen3moe":
        values |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
    epsilon = "layer_norm_epsilon" if architecture in ("gpt2", "bert", "nomic-bert") else "layer_norm_rms_epsilon"
    values[f"attention.{epsilon}"] = float(np.float32(1e-5))
    for key, value in changes.items():
        values[key.replace("__", ".")] = value
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in values.items() if value is not None},
    }


# In tests of their own, as test_gguf_encoders.py, test_gguf_further.py, test_gguf_gemma.py and test_gguf_llamas.py.
_OTHERS = gguf_decoders, gguf_encoders, gguf_gemma, gguf_kimi, gguf_latent, gguf_lfm2, gguf_llamas, gguf_state_spaces
TESTED = {
    name
    for module in (*_OTHERS, gguf_dflash, gguf_eagle3, gguf_further, gguf_rwkv, gguf_step35)
    for name in module.READERS
} - {"bert"}


def read(architecture: str, tensors: dict | None = None, tokenizer: dict | None = None, **changes) -> dict:
    arrays = {"token_embd.weight": np.zeros((ROWS, HIDDEN), np.float32), **(tensors or {})}
    if architecture in ("bert", "nomic-bert"):
        arrays["token_types.weight"] = np.zeros((2, HIDDEN), np.float32)
    extra = {f"tokenizer.ggml.{key}": value for key, value in (tokenizer or {}).items()}
    return hf_config_from_gguf({**metadata(architecture, **changes), **extra}, Tensors(arrays))


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name not in TESTED])
def test_each_architecture_gives_a_config_of_a_class_we_have(architecture):
    config = read(architecture)
    modules = {"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text", "gemma-embedding": "gemma3_text"}
    module = modules.get(architecture, architecture)
    assert model_class_for(config).__module__ == f"kvasir.models.{module}"
    assert config["vocab_size"] == ROWS


def test_a_float32_is_the_decimal_that_was_meant():
    assert read("llama")["rms_norm_eps"] == 1e-5
    assert read("llama", rope__freq_base=float(np.float32(1e6)))["rope_theta"] == 1e6


def test_the_head_is_tied_where_the_file_has_no_output():
    assert read("llama")["tie_word_embeddings"] is True
    output = np.zeros((ROWS, HIDDEN), np.float32)
    assert read("llama", {"output.weight": output})["tie_word_embeddings"] is False


def test_a_window_makes_a_llama_a_mistral_and_no_other():
    config = read("llama", attention__sliding_window=16)
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)
    with pytest.raises(UnsupportedModel, match="sliding_window"):
        read("qwen2", attention__sliding_window=16)


def test_experts_make_a_llama_a_mixtral():
    config = read("llama", expert_count=8, expert_used_count=2, attention__sliding_window=0)
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 8, 2)
    assert config["sliding_window"] is None
    with pytest.raises(ModelFileError, match="expert_used_count"):
        read("llama", expert_count=8)


def test_gemmas_settings_that_the_file_leaves_to_its_reader():
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    config = read("gemma2", block_count=4, attention__key_length=16, attention__value_length=16)
    assert config["layer_types"] == [kinds[k] for k in "sfsf"] and config["query_pre_attn_scalar"] == 16
    largest = read("gemma2", block_count=46, attention__key_length=16, attention__value_length=16)
    assert largest["query_pre_attn_scalar"] == HIDDEN // 4
    config = read("gemma3", block_count=7, attention__sliding_window=8)
    assert config["layer_types"] == [kinds[k] for k in "sssssfs"] and config["rope_local_base_freq"] == 1e4
    assert set(read("gemma3", block_count=7)["layer_types"]) == {"full_attention"}
    flags = {"attention__sliding_window_pattern": np.array([True, True, False]), "attention__sliding_window": 8}
    assert read("gemma3", block_count=3, **flags)["layer_types"] == [kinds[k] for k in "ssf"]
    flags["attention__sliding_window_pattern"] = 2
    assert read("gemma3", block_count=3, **flags)["layer_types"] == [kinds[k] for k in "sfs"]


def test_phi3_rotates_the_number_of_dimensions_in_the_file():
    assert read("phi3")["partial_rotary_factor"] == 1.0
    assert read("phi3", rope__dimension_count=6)["partial_rotary_factor"] == 0.75
    with pytest.raises(ModelFileError, match="dimension_count"):
        read("phi3", rope__dimension_count=10)


def test_longrope_comes_from_its_tensors():
    tensors = {f"rope_factors_{kind}.weight": np.arange(1, 5, dtype=np.float32) for kind in ("short", "long")}
    keys = {"rope__scaling__original_context_length": 16, "rope__scaling__attn_factor": 1.5}
    _, scaling = read_rope(Fields(read("phi3", tensors, **keys)), CONTEXT, partial=True)
    assert (scaling.kind, scaling.factors, scaling.attention_factor) == ("longrope", (1.0, 2.0, 3.0, 4.0), 1.5)
    assert scaling.context_length(CONTEXT) == CONTEXT and scaling.short_until == 16
    del tensors["rope_factors_long.weight"]
    with pytest.raises(ModelFileError, match="rope_factors_long"):
        read("phi3", tensors, **keys)


def test_longrope_completes_what_the_file_leaves_out():
    tensors = {f"rope_factors_{kind}.weight": np.arange(1, 5, dtype=np.float32) for kind in ("short", "long")}
    config = read("phi3", tensors, rope__scaling__original_context_length=16)
    found = model_class_for(config).Config.from_hf(config)
    assert found.rope_scaling.attention_factor == math.sqrt(1 + math.log(4) / math.log(16))
    whole = read("phi3", tensors)
    assert model_class_for(whole).Config.from_hf(whole).context_length == CONTEXT


def test_a_factor_without_a_type_is_linear():
    for key in ("rope__scale_linear", "rope__scaling__factor"):
        _, scaling = read_rope(Fields(read("llama", **{key: 4.0})), CONTEXT)
        assert (scaling.kind, scaling.factor) == ("linear", 4.0)
        assert read("llama", **{key: 4.0}, rope__scaling__type="none")["rope_scaling"] is None
        assert read("llama", **{key: 0.0})["rope_scaling"] is None


@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_short.weight"])
def test_factors_of_a_tensor_do_not_replace_another_scaling(name):
    factors = {name: np.ones(4, np.float32), "rope_factors_long.weight": np.ones(4, np.float32)}
    with pytest.raises(UnsupportedModel, match=r"linear.* 4.*rope_f"):
        read("llama", factors, rope__scale_linear=4.0)
    for kind in ("yarn", "longrope"):
        with pytest.raises(UnsupportedModel, match=rf"{kind}.* 4"):
            read("llama", factors, rope__scaling__type=kind, rope__scaling__factor=4.0)


def test_a_window_of_0_disables_the_window():
    full = read("gemma2", block_count=4, attention__sliding_window=0)
    assert model_class_for(full).Config.from_hf(full).windows == (0, 0, 0, 0)
    assert read("gemma2", block_count=4)["sliding_window"] == 4096


def test_head_sizes_are_the_files_own():
    config = read("qwen3", attention__key_length=16, attention__value_length=16, attention__head_count_kv=2)
    assert (config["head_dim"], config["num_key_value_heads"]) == (16, 2)
    assert read("qwen3")["head_dim"] == HIDDEN // 4


def test_counts_per_layer_must_be_equal():
    same = np.array([2, 2], np.int32)
    assert read("llama", attention__head_count_kv=same)["num_key_value_heads"] == 2
    with pytest.raises(ModelFileError, match="head_count_kv"):
        read("llama", attention__head_count_kv=np.array([2, 4], np.int32))


def test_biases_are_seen_in_the_tensors():
    bias = {"blk.0.attn_q.bias": np.zeros(HIDDEN, np.float32), "blk.0.ffn_up.bias": np.zeros(80, np.float32)}
    assert (read("llama")["attention_bias"], read("llama")["mlp_bias"]) == (False, False)
    assert (read("llama", bias)["attention_bias"], read("llama", bias)["mlp_bias"]) == (True, True)


def test_rope_factors_come_from_their_tensor():
    factors = np.array([1.0, 1.5, 4.0, 8.0], np.float32)
    config = read("llama", {"rope_freqs.weight": factors})
    _, scaling = read_rope(Fields(config), CONTEXT)
    assert (scaling.kind, scaling.factors) == ("factors", (1.0, 1.5, 4.0, 8.0))


def yarn(**changes):
    keys = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__finetuned": True}
    config = read("qwen2", rope__scaling__original_context_length=16, **keys, **changes)
    return read_rope(Fields(config), CONTEXT)[1]


def test_yarn_reads_as_in_a_hugging_face_config():
    scaling = yarn()
    assert (scaling.kind, scaling.factor, scaling.original_max_position) == ("yarn", 4.0, 16)
    assert scaling.attention_factor == 0.1 * math.log(4) + 1
    assert (yarn(rope__scaling__yarn_beta_fast=8.0).beta_fast, scaling.beta_fast) == (8.0, 32.0)


def test_yarns_extra_attention_factor_multiplies():
    assert yarn(rope__scaling__attn_factor=0.5).attention_factor == 0.5 * (0.1 * math.log(4) + 1)


def test_linear_scaling_in_both_spellings():
    new = read("llama", rope__scaling__type="linear", rope__scaling__factor=2.0)
    old = read("llama", rope__scaling__type="linear", rope__scale_linear=2.0)
    assert new["rope_scaling"] == old["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_all_ids_that_end_an_answer_are_given():
    ids = {"eos_token_id": 2, "eot_token_id": 5, "eom_token_id": 2, "bos_token_id": 1}
    config = read("llama", tokenizer=ids)
    assert (config["eos_token_id"], config["bos_token_id"]) == ([2, 5], 1)


@pytest.mark.parametrize(("number", "kind"), [(0, "none"), (1, "mean"), (2, "cls"), (3, "last")])
def test_pooling_kinds(number, kind):
    assert read("bert", pooling_type=number)["pooling"]["kind"] == kind
    assert read("qwen3", pooling_type=number)["pooling"]["kind"] == kind
    assert "pooling" not in read("bert")


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("grok", {}),
        ("gemma3", {"attention__scale": 0.5}),
        ("qwen3", {"expert_count": 8}),
        ("qwen3moe", {"expert_weights_norm": False}),
        ("qwen3moe", {"expert_shared_count": 1}),
        ("phi3", {"rope__scaling__type": "ntk"}),
        ("llama", {"attention__value_length": 4}),
        ("llama", {"rope__dimension_count": 4}),
        ("llama", {"attention__scale": 0.5}),
        ("llama", {"logit_scale": 0.5}),
        ("llama", {"attn_logit_softcapping": 50.0}),
        ("llama", {"rope__scaling__type": "ntk"}),
        ("qwen2", {"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.5}),
        ("bert", {"pooling_type": 4}),
        ("bert", {"attention__causal": True}),
        ("nomic-bert", {"attention__causal": True}),
    ],
)
def test_a_feature_without_code_is_refused(architecture, changes):
    with pytest.raises(UnsupportedModel):
        read(architecture, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_count": None},
        {"block_count": 10**9},
        {"embedding_length": 0},
        {"embedding_length": "32"},
        {"attention__layer_norm_rms_epsilon": math.nan},
        {"vocab_size": ROWS + 1},
        {"rope__freq_base": math.inf},
    ],
)
def test_missing_and_impossible_values_are_bad_files(changes):
    with pytest.raises(ModelFileError):
        read("llama", **changes)


def test_a_file_without_architecture_or_embedding_is_bad():
    with pytest.raises(ModelFileError, match=r"general\.architecture"):
        hf_config_from_gguf({}, Tensors({}))
    with pytest.raises(ModelFileError, match="token_embd"):
        hf_config_from_gguf(metadata("llama"), Tensors({}))


@pytest.mark.parametrize("token", [-1, 1.5, "2", 1 << 40])
def test_a_token_id_that_cannot_be_is_refused(token):
    with pytest.raises(ModelFileError, match="eos_token_id"):
        read("llama", tokenizer={"eos_token_id": token})


NUMBERS = st.integers(-1, 2**40) | st.floats() | st.booleans() | st.text(max_size=4)
ARRAYS = arrays(st.sampled_from([np.int32, np.float32, np.bool_]), st.integers(0, 5))
KEYS = [
    *metadata("llama"),
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
    "llama.attention.head_count_kv",
]


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS[1:]), NUMBERS | ARRAYS), st.none() | ARRAYS)
def test_any_metadata_gives_a_config_or_our_error(values, factors):
    tensors = {"token_embd.weight": np.zeros((ROWS, HIDDEN), np.float32)}
    if factors is not None:
        tensors["rope_freqs.weight"] = factors
    try:
        config = hf_config_from_gguf({**metadata("llama"), **values}, Tensors(tensors))
        model_class_for(config).Config.from_hf(config)
    except KvasirError as error:
        assert len(str(error)) < 500


def test_a_config_is_plain_json():
    factors = {"rope_freqs.weight": np.ones(4, np.float32)}
    config = read("llama", factors, {"eos_token_id": 2}, attention__head_count_kv=np.array([2], np.uint32))
    assert json.loads(json.dumps(config)) == config
