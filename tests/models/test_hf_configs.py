"""Published configs: each gives our config, or a refusal that says what is missing.

Those that run are shrunk, with their rope fields and ratios kept, and compared with transformers.
"""

import json

import pytest
import torch

from kvasir.cli.config_facts import DEVICES, FORMATS, read_config_facts
from kvasir.errors import UnsupportedModel
from kvasir.models.config import read_generation_config, read_hf_config
from kvasir.models.registry import model_class_for
from tests._shared import need
from tests.models.driver import logits_of
from tests.models.hf import load, randomized, save
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, random_ids

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

# folder -> layers, width, heads, KV heads, head width, vocabulary, theta, tied
RUN = {
    "gemma-3": (34, 2560, 8, 4, 256, 262208, 1e6, True),
    "gemma-4": (35, 1536, 8, 1, 256, 262144, 1e6, True),
    "llama-2-7b-chat-hf": (32, 4096, 32, 32, 128, 32000, 1e4, False),
    "llama-3.2-3b-instruct": (28, 3072, 24, 8, 128, 128256, 5e5, True),
    "mistral-7b-instruct-v0.2": (32, 4096, 32, 8, 128, 32000, 1e6, False),
    "qwen1.5-0.5b-chat": (24, 1024, 16, 16, 64, 151936, 1e6, True),
    "qwen2-1.5b-instruct": (28, 1536, 12, 2, 128, 151936, 1e6, True),
    "qwen2-7b-instruct": (28, 3584, 28, 4, 128, 152064, 1e6, False),
    "qwen2.5-7b-instruct": (28, 3584, 28, 4, 128, 152064, 1e6, False),
    "qwen3": (36, 2560, 32, 8, 128, 151936, 1e6, True),
    "qwen3.5": (24, 1024, 8, 2, 256, 248320, 1e7, True),
    "yi-6b-chat": (32, 4096, 32, 4, 128, 64000, 5e6, False),
}
REFUSED = {
    "glm-4-9b-chat": "chatglm",
    "minicpm4": "minicpm",
}
EOS = {
    "gemma-3": (1, 106),
    "gemma-4": (1, 106, 50),
    "llama-2-7b-chat-hf": (2,),
    "llama-3.2-3b-instruct": (128001, 128008, 128009),
    "mistral-7b-instruct-v0.2": (2,),
    "qwen1.5-0.5b-chat": (151645,),
    "qwen2-1.5b-instruct": (151645,),
    "qwen2-7b-instruct": (151645,),
    "qwen2.5-7b-instruct": (151645, 151643),
    "qwen3": (151645, 151643),
    "qwen3.5": (248044,),
    "yi-6b-chat": (7,),
}


STARCODER = "starcoder-wizardcoder-15b"


def our_config(config: dict):
    return model_class_for(config).Config.from_hf(config)


def test_every_config_is_in_one_of_the_tables():
    folders = {path.parent.name for path in need("hf_configs").glob("*/config.json")}
    assert folders == RUN.keys() | REFUSED.keys() | {STARCODER} and not RUN.keys() & REFUSED.keys()


@pytest.mark.parametrize("folder", RUN)
def test_a_published_config_is_read(folder):
    c = our_config(read_hf_config(need("hf_configs", folder)))
    found = (c.num_layers, c.width, c.heads, c.kv_heads, c.head_dim, c.vocab_size, c.rope_theta, c.tied)
    assert found == RUN[folder]
    windows = {"gemma-3": ((1024,) * 5 + (0,)) * 5 + (1024,) * 4, "gemma-4": ((512,) * 4 + (0,)) * 7}
    assert c.windows == windows.get(folder, (0,) * c.num_layers)


def test_the_published_starcoder_is_read():
    c = our_config(read_hf_config(need("hf_configs", STARCODER)))
    assert (c.num_layers, c.width, c.heads, c.kv_heads, c.head_dim, c.vocab_size) == (40, 6144, 48, 1, 128, 49153)


@pytest.mark.parametrize("folder", REFUSED)
def test_an_architecture_without_code_is_refused_by_name(folder):
    config = read_hf_config(need("hf_configs", folder))
    with pytest.raises(UnsupportedModel, match=REFUSED[folder]) as refused:
        our_config(config)
    assert "add-a-model" in str(refused.value)
    assert ("never run" in str(refused.value)) == ("auto_map" in config)


@pytest.mark.parametrize("folder", RUN)
def test_end_ids_are_read(folder):
    path = need("hf_configs", folder)
    assert read_generation_config(path, read_hf_config(path)).eos_ids == EOS[folder]


# --- published configs that are not in the shared folder ---------------------------------------------

PHI_3_5_MINI = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "model_type": "phi3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
    "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [1.08] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False, "use_cache": True,
    "vocab_size": 32064,
}  # fmt: skip
PHI_4_MINI = {
    **PHI_3_5_MINI, "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999, "full_attn_mod": 1,
    "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "num_attention_heads": 24,
    "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "vocab_size": 200064,
}  # fmt: skip


@pytest.mark.parametrize("config", [PHI_3_5_MINI, PHI_4_MINI], ids=["Phi-3.5-mini", "Phi-4-mini"])
def test_configs_with_longrope_have_their_whole_context(config):
    """The factors are shortened to one number each."""
    found = our_config(config)
    assert (found.context_length, found.rotary_dim) == (131072, 96)
    assert found.rope_scaling.served(131072).factors == (1.08,) * 48
    assert found.rope_scaling.served(4096).factors == (1.0,) * 48


def published_here() -> dict[str, dict]:
    """The configs in this file."""
    return {name: value for name, value in globals().items() if isinstance(value, dict) and "architectures" in value}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUN, *published_here()])
def test_the_memory_of_each_published_config_is_known(name, tmp_path):
    """`kvasir inspect CONFIG`, by format of the weights, context and number of devices."""
    config = published_here().get(name) or json.loads(need("hf_configs", name, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_config_facts(tmp_path / "config.json")
    assert not facts.reason, "the program executor runs it"
    alone = [one for one in facts.needs if one.devices == 1]
    assert [one.format for one in alone] == list(FORMATS)
    assert all(2 * one.weights > facts.parameters and min(one.contexts.values()) > 0 for one in alone)
    assert all(facts.max_context in one.contexts and one.devices in DEVICES for one in facts.needs)


# --- one field of another kind of model -------------------------------------------------------------


@pytest.mark.parametrize("folder", ["llama-3.2-3b-instruct", "mistral-7b-instruct-v0.2", "qwen2-7b-instruct", "qwen3"])
@pytest.mark.parametrize(
    "field",
    [
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"query_pre_attn_scalar": 256},
        {"embedding_multiplier": 12.0},
        {"logits_scaling": 8.0},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"num_experts": 64},
        {"hidden_act": "xielu"},
        {"no_rope_layers": [1, 1, 0]},
        {"clip_qkv": 8.0},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_foreign_field_is_refused(folder, field):
    with pytest.raises(UnsupportedModel):
        our_config(read_hf_config(need("hf_configs", folder)) | field)


@pytest.mark.parametrize("field", [{"sliding_window": 4096}, {"use_qk_norm": True}, {"attention_sinks": True}])
def test_a_llama_refuses_what_other_families_have(field):
    with pytest.raises(UnsupportedModel, match=next(iter(field))):
        our_config(read_hf_config(need("hf_configs", "llama-3.2-3b-instruct")) | field)


# --- shrunk, against transformers -------------------------------------------------------------------

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHRUNK = {
    "llama-3.2-3b-instruct": {},
    "mistral-7b-instruct-v0.2": {},
    "qwen1.5-0.5b-chat": {},
    "qwen2.5-7b-instruct": {},
    "qwen3": {},
    "yi-6b-chat": {},
}
VARIED = [
    ("llama-3.2-3b-instruct", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("yi-6b-chat", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("mistral-7b-instruct-v0.2", {"sliding_window": 20}),
    ("qwen2.5-7b-instruct", {"rope_scaling": YARN}),
    ("qwen2.5-7b-instruct", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    ("qwen3", {"rope_scaling": {**YARN, "beta_fast": 16.0, "attention_factor": 0.8}}),
    ("qwen3", {"attention_bias": True}),
]


def shrunk(folder: str, changes: dict) -> dict:
    """Fewer layers, 1/32 of the width, a head of 16, the lengths of rope by 1/256; all else as published."""
    config = read_hf_config(need("hf_configs", folder))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    group = heads // kv_heads
    config |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 2 * group,
        "num_key_value_heads": 2,
        "hidden_size": 32 * group,
        "intermediate_size": 80,
        "vocab_size": 101,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if "head_dim" in config:
        config["head_dim"] = 16
    scaling = config.get("rope_scaling")
    if scaling and "original_max_position_embeddings" in scaling:
        config["rope_scaling"] = {**scaling, "original_max_position_embeddings": 32}
    return config | changes


@pytest.mark.few(6)
@pytest.mark.parametrize(("folder", "changes"), [*SHRUNK.items(), *VARIED])
def test_shrunk_models_compute_what_transformers_computes(tmp_path, folder, changes):
    config = shrunk(folder, changes)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "given")
    hf = randomized(transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager"))
    ids = random_ids(150, 101)
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    save(hf, tmp_path / "model")
    for spelling in (config, json.loads((tmp_path / "model" / "config.json").read_text())):
        (tmp_path / "model" / "config.json").write_text(json.dumps(spelling))
        assert distance(logits_of(load(tmp_path / "model"), ids), expected) < TOLERANCE


FLIPPED = [
    ("llama-3.2-3b-instruct", {}, {"factor": 8.0}),
    ("llama-3.2-3b-instruct", {}, {"low_freq_factor": 2.0}),
    ("llama-3.2-3b-instruct", {}, {"high_freq_factor": 8.0}),
    ("llama-3.2-3b-instruct", {}, {"original_max_position_embeddings": 64}),
    ("llama-3.2-3b-instruct", {}, {"rope_type": "linear"}),
    ("qwen2.5-7b-instruct", {"rope_scaling": YARN}, {"factor": 2.0}),
    ("qwen2.5-7b-instruct", {"rope_scaling": YARN}, {"original_max_position_embeddings": 64}),
    ("qwen2.5-7b-instruct", {"rope_scaling": YARN}, {"beta_fast": 4.0, "truncate": False}),
    ("qwen2.5-7b-instruct", {"rope_scaling": YARN}, {"beta_slow": 0.1}),
    ("qwen2.5-7b-instruct", {"rope_scaling": YARN}, {"attention_factor": 1.0}),
    ("qwen2.5-7b-instruct", {"rope_scaling": YARN}, {"mscale": 2.0, "mscale_all_dim": 1.0}),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("folder", "changes", "flip"), FLIPPED)
def test_each_rope_field_moves_the_logits(tmp_path, folder, changes, flip):
    # A small theta, so that the few frequencies of a small head lie where these fields act.
    config = {**shrunk(folder, changes), "rope_theta": 100.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    hf = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    save(randomized(hf), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = random_ids(150, 101)
    flipped = {**config["rope_scaling"], **flip}
    assert distance(logits_of(load(tmp_path, rope_scaling=flipped), ids), logits_of(load(tmp_path), ids)) > SENSITIVITY
