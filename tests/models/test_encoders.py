"""The encoders against transformers: equal hidden rows, and every field of a config makes a difference to them."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import KvasirError, ModelFileError, UnsupportedModel
from kvasir.layers.rope import RopeScaling
from kvasir.models.modernbert import ModernBertConfig
from kvasir.models.registry import model_class, model_class_for
from kvasir.models.rope_encoder import NewConfig, NomicBertConfig
from tests.examples import examples
from tests.models.driver import make_cache, step
from tests.models.families import config_of
from tests.models.hf import randomized
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, ours, random_ids, state_of
from tests.models.test_fields import JSON_VALUES

_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "layer_norm_eps": 1e-3,
    "pad_token_id": 0,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "roberta": {"model_type": "roberta", **_SIZES, "pad_token_id": 1, "type_vocab_size": 1},
    "xlm-roberta": {"model_type": "xlm-roberta", **_SIZES, "pad_token_id": 3, "hidden_act": "gelu_new"},
    "camembert": {"model_type": "camembert", **_SIZES, "pad_token_id": 1},
    "electra": {"model_type": "electra", **_SIZES, "embedding_size": 48},
    "electra-small": {"model_type": "electra", **_SIZES, "embedding_size": 20},
    "albert": {"model_type": "albert", **_SIZES, "embedding_size": 20, "hidden_act": "gelu_new"},
    "distilbert": {
        "model_type": "distilbert", "vocab_size": 97, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4,
        "max_position_embeddings": 130,
    },
    "mpnet": {
        "model_type": "mpnet", **_SIZES, "max_position_embeddings": 202, "pad_token_id": 1,
    },
    "deberta-v3": {
        "model_type": "deberta-v2", **_SIZES, "relative_attention": True, "position_buckets": 16,
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False,
        "max_position_embeddings": 120,
    },
    "deberta-v2": {
        "model_type": "deberta-v2", **_SIZES, "relative_attention": True, "max_relative_positions": 20,
        "share_att_key": True, "pos_att_type": ["c2p"], "type_vocab_size": 2,
    },
    "jina-v3": {"model_type": "jina_embeddings_v3", **_SIZES, "rope_parameters": {"rope_theta": 50.0}},
    "nomic": {"model_type": "nomic_bert", **_SIZES, "rope_parameters": {"rope_theta": 50.0}},
    "gte": {"model_type": "gte", **_SIZES, "rope_parameters": {"rope_theta": 50.0}},
    "gte-linear": {
        "model_type": "gte", **_SIZES,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0 ** (2 / 12), "rope_theta": 200.0},
    },
}  # fmt: skip
_MODERN = {
    "model_type": "modernbert", "norm_eps": 1e-3, "local_attention": 24, "num_hidden_layers": 4,
    "rope_parameters": {"full_attention": {"rope_theta": 50.0}, "sliding_attention": {"rope_theta": 20.0}},
    "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
ENCODERS["modernbert"] = {**_SIZES, **_MODERN}
ENCODERS["modernbert-biased"] = {
    **ENCODERS["modernbert"], "norm_bias": True, "attention_bias": True, "mlp_bias": True, "local_attention": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
ENCODERS["eurobert"] = {
    **{name: value for name, value in _SIZES.items() if name != "layer_norm_eps"},
    "model_type": "eurobert", "num_key_value_heads": 2, "rms_norm_eps": 1e-3, "bos_token_id": 1, "eos_token_id": 2,
    "mask_token_id": 3, "rope_parameters": {"rope_theta": 50.0},
}  # fmt: skip
ENCODERS["embedding-gemma"] = {
    **config_of("gemma3"), "use_bidirectional_attention": True, "vocab_size": 97,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
APART = ("roberta", "mpnet", "deberta-v3", "gte", "modernbert", "embedding-gemma")  # each has positions of its own
LENGTH = 100
_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 60.0}}
_LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "mpnet": [{"layer_norm_eps": 0.5}, {"hidden_act": "relu"}, {"num_attention_heads": 2}],
    "deberta-v3": [
        {"layer_norm_eps": 0.5}, {"hidden_act": "relu"}, {"num_attention_heads": 2}, {"max_relative_positions": 60},
        {"pos_att_type": "c2p"}, {"pos_att_type": "p2c"},
    ],
    "roberta": [{"layer_norm_eps": 0.5}, {"hidden_act": "relu"}, {"num_attention_heads": 2}, {"pad_token_id": 2}],
    "distilbert": [{"activation": "relu"}, {"n_heads": 2}],
    "jina-v3": [{"layer_norm_eps": 0.5}, {"hidden_act": "relu"}, {"num_attention_heads": 2}, _THETA, _LINEAR],
    "nomic": [{"layer_norm_eps": 0.5}, {"hidden_act": "relu"}, {"num_attention_heads": 2, "head_dim": 24}, _THETA],
    "gte": [{"layer_norm_eps": 0.5}, {"hidden_act": "relu"}, {"num_attention_heads": 2}, _THETA, _LINEAR],
    "modernbert": [
        {"norm_eps": 0.5}, {"hidden_activation": "relu"}, {"num_attention_heads": 2}, {"local_attention": 26},
        {"layer_types": ["full_attention"] * 4},
        {"rope_parameters": {**_MODERN["rope_parameters"], "full_attention": {"rope_theta": 60.0}}},
        {"rope_parameters": {**_MODERN["rope_parameters"], "sliding_attention": {"rope_theta": 30.0}}},
    ],
    "eurobert": [{"rms_norm_eps": 0.5}, {"hidden_act": "relu"}, _THETA, _LINEAR],
    "embedding-gemma": [{"sliding_window": 22}, {"query_pre_attn_scalar": 48}, {"layer_types": ["full_attention"] * 4}],
}  # fmt: skip


def hidden_of(model: Any, texts: list[list[int]], **options: Any) -> list[torch.Tensor]:
    """Hidden rows of texts computed together, each with its own blocks."""
    cache = make_cache(model, blocks=1 + 8 * len(texts), fill=float("nan"), **options)
    pieces = [(ids, 0, np.arange(1 + 8 * i, 9 + 8 * i, dtype=np.int32)) for i, ids in enumerate(texts)]
    return step(model, cache, pieces, causal=False)


@cache
def oracle(transformers: Any, name: str) -> Any:
    config = deepcopy(ENCODERS[name])
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    return randomized(transformers.AutoModel.from_config(config, attn_implementation="eager"))


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


def ids_of(count: int) -> list[int]:
    return [4 + i for i in random_ids(count, 93, seed=count)]  # without padding, which RoBERTa gives no position


@pytest.mark.few(9)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_rows_agree(transformers, name):
    hf = oracle(transformers, name)
    model = ours(hf.config.to_dict(), state_of(hf))
    for count in (1, 2, 33, LENGTH):
        rows = expected(hf, ids_of(count))
        assert 1 < rows.abs().max() < 100, "the weights' scale hides errors"
        assert distance(hidden_of(model, [ids_of(count)])[0], rows) < TOLERANCE


@pytest.mark.few(16)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "change"),
    [pytest.param(n, c, id=f"{n}-{i}") for n, changes in CHANGES.items() for i, c in enumerate(changes)],
)
def test_every_field_moves_the_rows(transformers, name, change):
    hf = oracle(transformers, name)
    config, state, ids = hf.config.to_dict(), state_of(hf), ids_of(LENGTH)
    if name == "mpnet" and "num_attention_heads" in change:
        bias = state["encoder.relative_attention_bias.weight"]
        state = state | {"encoder.relative_attention_bias.weight": bias[:, :2].contiguous()}
    if "pad_token_id" in change:
        config["max_position_embeddings"] += 1
        state = state | {
            "embeddings.position_embeddings.weight": torch.cat([state["embeddings.position_embeddings.weight"]] * 2)[
                :131
            ]
        }
    before = hidden_of(ours(hf.config.to_dict(), state_of(hf)), [ids])[0]
    assert distance(hidden_of(ours(config | change, state), [ids])[0], before) > SENSITIVITY


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [name if name == "modernbert" else pytest.param(name, marks=pytest.mark.slow) for name in ENCODERS],
)
def test_every_weight_moves_the_rows(transformers, name):
    hf = oracle(transformers, name)
    config, state, ids = hf.config.to_dict(), state_of(hf), ids_of(LENGTH)
    before = hidden_of(ours(config, state), [ids])[0]
    for key, tensor in state.items():
        shared = ("key.bias", "k_lin.bias", "attn.k.bias", *(["key_proj.bias"] if name == "deberta-v2" else []))
        if "pooler" in key or key.endswith(shared):
            continue  # the softmax cancels what all keys share
        changed = state | {key: tensor.flip(0 if len(tensor) > 1 else 1)}
        assert distance(hidden_of(ours(config, changed), [ids])[0], before) > 10 * TOLERANCE, key


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name", [name if name in APART else pytest.param(name, marks=pytest.mark.slow) for name in ENCODERS]
)
def test_alone_and_together_give_the_same_bits(exact_machine, transformers, name):
    hf = oracle(transformers, name)
    model = ours(hf.config.to_dict(), state_of(hf))
    texts = [ids_of(count) for count in (1, 40, 17, 100, 5)]
    together = hidden_of(model, texts)
    reversed_rows = hidden_of(model, texts[::-1])[::-1]
    for ids, rows, other in zip(texts, together, reversed_rows, strict=True):
        assert torch.equal(hidden_of(model, [ids], block_size=64)[0], rows) and torch.equal(rows, other)


# --- published configs ------------------------------------------------------------------------------


def test_a_config_that_nomic_publishes(transformers):
    published = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu",
        "attn_pdrop": 0.0, "bos_token_id": None, "causal": False, "dense_seq_output": True, "embd_pdrop": 0.0,
        "eos_token_id": None, "fused_bias_fc": True, "fused_dropout_add_ln": True, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-12, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "n_embd": 768, "n_head": 12,
        "n_inner": 3072, "n_layer": 12, "n_positions": 8192, "pad_vocab_size_multiple": 64, "parallel_block": False,
        "parallel_block_tied_norm": False, "prenorm": False, "qkv_proj_bias": False, "reorder_and_upcast_attn": False,
        "resid_pdrop": 0.0, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True, "summary_activation": None, "summary_first_dropout": 0.0,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "type_vocab_size": 2,
        "use_cache": True, "use_flash_attn": True, "use_rms_norm": False, "use_xentropy": True, "vocab_size": 30528,
    }  # fmt: skip
    found = model_class_for(published).Config.from_hf(published)
    default = NomicBertConfig.from_hf({**transformers.NomicBertConfig().to_dict(), "architectures": ["NomicBertModel"]})
    assert found == replace(default, max_position=8192)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_jina_publishes_gives_its_base_models_rows(transformers):
    """It has the type of XLM-RoBERTa, and adapters beside the weights."""
    hf = oracle(transformers, "jina-v3")
    config = {name: value for name, value in hf.config.to_dict().items() if not name.startswith("rope")}
    config |= {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary"}
    config |= {"rotary_emb_base": 50.0, "lora_rank": 4, "lora_adaptations": ["separation"], "use_reg_tokens": False}
    state = {}
    for name, tensor in state_of(hf).items():
        adapted = name.endswith(".weight") and tensor.dim() == 2
        bare = f"roberta.{name.removeprefix('roberta.').removesuffix('.weight')}"
        state[f"{bare}.parametrizations.weight.original" if adapted else f"roberta.{name}"] = tensor
        if adapted:
            state |= {f"{bare}.parametrizations.weight.0.lora_{part}": torch.ones(1, 4, 4) for part in "AB"}
    found = hidden_of(ours(config, state), [ids_of(40)])[0]
    assert torch.equal(found, hidden_of(ours(hf.config.to_dict(), state_of(hf)), [ids_of(40)])[0])


@pytest.mark.filterwarnings("ignore")
def test_jinas_names_of_xlm_roberta(transformers):
    """As in jina-reranker-v2."""
    hf = oracle(transformers, "xlm-roberta")
    state, renamed = state_of(hf), {}
    parts = {
        "attention.output.dense": "mixer.out_proj", "attention.output.LayerNorm": "norm1", "output.LayerNorm": "norm2",
        "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2",
    }  # fmt: skip
    for name, tensor in state.items():
        if ".attention.self." in name:
            layer, kind = name.split(".")[2], name.rsplit(".", 1)[1]
            of = f"encoder.layer.{layer}.attention.self"
            joined = torch.cat([state[f"{of}.{part}.{kind}"] for part in ("query", "key", "value")])
            renamed[f"roberta.encoder.layers.{layer}.mixer.Wqkv.{kind}"] = joined
            continue
        name = name.replace("encoder.layer.", "encoder.layers.").replace("embeddings.LayerNorm", "emb_ln")
        for old, new in parts.items():
            name = name.replace(old, new)
        renamed[f"roberta.{name}"] = tensor
    config, ids = hf.config.to_dict(), ids_of(40)
    found = hidden_of(ours(config | {"use_flash_attn": True, "lora_rank": 4}, renamed), [ids])[0]
    assert torch.equal(found, hidden_of(ours(config, state), [ids])[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "rope"), [
    ("gte", {"rope_theta": 50.0}),
    ("gte-linear", {"rope_theta": 50.0, "rope_scaling": {"type": "ntk", "factor": 4.0}}),
])  # fmt: skip
def test_new_checkpoints_of_alibaba_agree(transformers, name, rope):
    """Their tensors have transformers' names but for the prefix; NTK scaling is another theta and a linear factor."""
    hf = oracle(transformers, name)
    config = {key: value for key, value in hf.config.to_dict().items() if key != "rope_parameters"}
    state = {f"new.{key}": tensor for key, tensor in state_of(hf).items()}
    model = ours(config | rope | {"model_type": "new", "architectures": ["NewModel"]}, state)
    assert distance(hidden_of(model, [ids_of(60)])[0], expected(hf, ids_of(60))) < TOLERANCE


def test_a_config_that_alibaba_publishes():
    published = {
        "architectures": ["NewModel", "NewForTokenClassification"], "model_type": "new", "hidden_size": 768,
        "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0, "hidden_act": "gelu", "intermediate_size": 3072,
        "hidden_dropout_prob": 0.1, "initializer_range": 0.02, "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False, "logn_attention_scale": False, "max_position_embeddings": 8192, "pack_qkv": True,
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1, "position_embedding_type": "rope",
        "rope_scaling": {"factor": 8.0, "type": "ntk"}, "rope_theta": 20000, "torch_dtype": "float16",
        "type_vocab_size": 1, "unpad_inputs": False, "use_memory_efficient_attention": False, "vocab_size": 250048,
    }  # fmt: skip
    found = model_class_for(published).Config.from_hf(published)
    assert (found.rope_theta, found.context_length) == (160000.0, 8192)
    assert found.rope_scaling == RopeScaling("linear", 8.0 ** (2 / 64))
    with pytest.raises(UnsupportedModel, match="mixed_b"):
        NewConfig.from_hf({**published, "rope_scaling": {"factor": 8.0, "type": "ntk", "mixed_b": 0.5}})


def test_a_config_that_answer_ai_publishes(transformers):
    published = {
        "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
        "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True, "deterministic_flash_attn": False,
        "embedding_dropout": 0.0, "eos_token_id": 50282, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
        "gradient_checkpointing": False, "hidden_activation": "gelu", "hidden_size": 768,
        "initializer_cutoff_factor": 2.0, "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05,
        "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False,
        "mlp_dropout": 0.0, "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05,
        "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283,
        "position_embedding_type": "absolute",
        "sep_token_id": 50282, "tie_word_embeddings": True, "torch_dtype": "float32", "vocab_size": 50368,
    }  # fmt: skip
    found = model_class_for(published).Config.from_hf(published)
    assert found == ModernBertConfig.from_hf(transformers.ModernBertConfig(classifier_pooling="mean").to_dict())
    assert found.distances == (0, 64, 64) * 7 + (0,)


@pytest.mark.parametrize(
    ("kind", "fields", "error"),
    [
        ("roberta", {"pad_token_id": 200}, ModelFileError),
        ("roberta", {"position_embedding_type": "relative_key"}, UnsupportedModel),
        ("roberta", {"adapter_size": 8}, UnsupportedModel),
        ("electra", {"embedding_size": 0}, ModelFileError),
        ("albert", {"embedding_size": "wide"}, ModelFileError),
        ("albert", {"num_hidden_groups": 2}, UnsupportedModel),
        ("albert", {"inner_group_num": 2}, UnsupportedModel),
        ("distilbert", {"type_vocab_size": 2}, UnsupportedModel),
        ("jina_embeddings_v3", {"lora_rank": 4}, UnsupportedModel),
        ("jina_embeddings_v3", {"num_attention_heads": 16}, ModelFileError),
        ("nomic_bert", {"prenorm": True}, UnsupportedModel),
        ("nomic_bert", {"moe_every_n_layers": 2}, UnsupportedModel),
        ("nomic_bert", {"moe_every_n_layers": 2, "activation_function": "gelu"}, ModelFileError),
        ("nomic_bert", {"head_dim": 7}, ModelFileError),
        ("nomic_bert", {"num_experts": 8}, UnsupportedModel),
        ("modernbert", {"local_attention": 0}, ModelFileError),
        ("modernbert", {"num_key_value_heads": 2}, ModelFileError),
        ("modernbert", {"rope_scaling": {"type": "ntk"}}, UnsupportedModel),
        ("eurobert", {"sliding_window": 8}, UnsupportedModel),
        ("gte", {"rope_parameters": {"rope_type": "ntk"}}, UnsupportedModel),
        ("new", {"layer_norm_type": "rms_norm"}, UnsupportedModel),
        ("new", {"position_embedding_type": "absolute"}, UnsupportedModel),
        ("new", {"rope_scaling": {"type": "ntk"}}, ModelFileError),
        ("new", {"rope_scaling": {"type": "ntk", "factor": 2.0, "beta": 1}}, UnsupportedModel),
        ("new", {"rope_scaling": "ntk"}, ModelFileError),
    ],
)
def test_configs_that_cannot_be_are_refused(kind, fields, error):
    with pytest.raises(error):
        model_class(kind).Config.from_hf({**_SIZES, **fields})


_NAMES = (
    *_SIZES, "rope_parameters", "rope_scaling", "rope_theta", "head_dim", "type_vocab_size", "hidden_act", "id2label",
    "num_labels", "problem_type", "sentence_transformers", "classifier_pooling", "classifier_activation", "layer_types",
    "local_attention", "global_attn_every_n_layers", "norm_bias", "embedding_size", "n_positions", "rotary_emb_base",
    "pooling", "pooling_tokens", "architectures", "use_bidirectional_attention", "sliding_window",
)  # fmt: skip


@examples(300)
@given(
    st.sampled_from(["bert", "roberta", "electra", "distilbert", "jina_embeddings_v3", "nomic_bert", "gte", "new",
                     "modernbert", "eurobert", "gemma3_text"]),
    st.dictionaries(st.sampled_from(_NAMES), JSON_VALUES),
    st.sampled_from(["XModel", "XForSequenceClassification", "XForTokenClassification"]),
)  # fmt: skip
def test_any_config_is_read_or_refused(kind, fields, architecture):
    try:
        model_class(kind).Config.from_hf({**_SIZES, "architectures": [architecture], **fields})
    except KvasirError as error:
        assert len(str(error)) < 600
