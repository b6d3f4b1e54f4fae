"""GGUF files of decoders with latent attention, written with gguf-py as llama.cpp's converters write them, give the
bits of the folders that they were made from; quantized, those of the same numbers in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.family_parts import LATENT, PLAIN
from tests.models.gguf_files import add_quantized, converted_by, gguf, names_of, writing
from tests.models.hf import load, randomized, save
from tests.models.oracle import random_ids
from tests.models.test_against_transformers import causal_model
from tests.models.test_gguf_llamas import add_experts
from tests.program.made import Driver, program_of

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

# llama.cpp has one epsilon for all norms, and one weight of YaRN's magnitudes.
FILE = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {**LATENT["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.7},
}
_ROPE_OF_MISTRAL = {**config_of("mistral4")["rope_parameters"], "mscale": 0.7, "mscale_all_dim": 0.7}
MISTRAL4 = {**config_of("mistral4"), "rms_norm_eps": 1e-6}
MINICPM3 = {"scale_emb": 12, "dim_model_base": 256, "rms_norm_eps": 1e-6, "rope_parameters": PLAIN}
# Per file: its config, and whether it has the matrices of keys and values apart, the keys' transposed.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "deepseek_v2": ({**config_of("deepseek-v2"), **FILE}, True),
    "deepseek_v2_lite": ({**config_of("deepseek-v2-lite"), **FILE, "n_group": 1, "topk_group": 1}, True),
    "deepseek_v3": ({**config_of("deepseek-v3"), **FILE}, True),
    "deepseek_v3_old": ({**config_of("deepseek-v3"), **FILE}, False),
    "deepseek_v32": ({**config_of("deepseek-v32"), **FILE}, True),
    "glm_moe_dsa": ({**config_of("glm-moe-dsa"), **FILE}, True),
    "minicpm3": ({**config_of("minicpm3"), **MINICPM3}, False),
    "glm4_moe_lite": ({**config_of("glm4-moe-lite"), **FILE, "mlp_layer_types": None}, True),
    "mimo_v2_flash": (config_of("mimo-v2-flash"), False),
    # The converter of folders drops the growth of queries, that of Mistral's own files keeps it.
    "mistral4": ({**MISTRAL4, "rope_parameters": {**_ROPE_OF_MISTRAL, "llama_4_scaling_beta": 0.0}}, True),
    "mistral4_growing": ({**MISTRAL4, "rope_parameters": _ROPE_OF_MISTRAL}, True),
    "youtu": ({**config_of("youtu"), "rms_norm_eps": 1e-6, "rope_parameters": PLAIN}, True),
}
ARCHITECTURES = {
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
    "minicpm3": "minicpm3",
    "mimo_v2_flash": "mimo2",
}
DRAFTING = 1  # layers for multi-token prediction, which a file may have at its end


def add_keys(writer: Any, c: Any, apart: bool) -> None:
    if c.model_type == "mimo_v2_flash":
        return add_mimo_keys(writer, c)
    rank, turning, dense = c.kv_lora_rank, c.qk_rope_head_dim, c.model_type == "minicpm3"
    keys = c.qk_nope_head_dim + turning
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(1 if apart else c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_key_length(rank + turning if apart else keys)
    if not dense:
        writer.add_value_length(rank if apart else c.v_head_dim)
    if apart:
        writer.add_key_length_mla(keys)
        writer.add_value_length_mla(c.v_head_dim)
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(c.q_lora_rank or 0)  # llama.cpp needs the 0 unless the file has 26 or 27 layers
    writer.add_rope_dimension_count(turning)
    if not dense:
        writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
        add_mixture(writer, c)
    if c.rope_parameters["rope_type"] == "yarn":
        add_yarn(writer, c.rope_parameters)
    if beta := c.rope_parameters.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(beta)
        writer.add_attn_temperature_length(c.rope_parameters["original_max_position_embeddings"])
    if hasattr(c, "index_topk"):
        writer.add_indexer_head_count(c.index_n_heads)
        writer.add_indexer_key_length(c.index_head_dim)
        writer.add_indexer_top_k(c.index_topk)
    if kinds := getattr(c, "indexer_types", None):
        writer.add_array(f"{writer.arch}.attention.indexer.types", [kind == "full" for kind in kinds])


def add_mimo_keys(writer: Any, c: Any) -> None:
    slides = [kind == "sliding_attention" for kind in c.layer_types] + [True] * DRAFTING
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers + DRAFTING)
    writer.add_nextn_predict_layers(DRAFTING)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv([c.num_key_value_heads * (1 + sliding) for sliding in slides])
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.v_head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_dimension_count(int(c.head_dim * 0.334))
    writer.add_rope_freq_base(c.rope_parameters["full_attention"]["rope_theta"])
    writer.add_float32("mimo2.rope.freq_base_swa", c.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_float32("mimo2.attention.value_scale", c.attention_value_scale)
    writer.add_expert_count(c.n_routed_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_group_count(c.n_group)
    writer.add_expert_group_used_count(c.topk_group)


def add_yarn(writer: Any, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def add_mixture(writer: Any, c: Any) -> None:
    if c.model_type == "youtu":  # without experts
        writer.add_leading_dense_block_count(c.num_hidden_layers)
        writer.add_expert_feed_forward_length(c.intermediate_size)
        writer.add_expert_shared_count(0)
        return
    add_experts(writer, c)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_leading_dense_block_count(getattr(c, "first_k_dense_replace", 1))
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    if c.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    gating = gguf.ExpertGatingFuncType
    if c.model_type != "mistral4":
        writer.add_expert_gating_func(gating.SOFTMAX if c.model_type == "deepseek_v2" else gating.SIGMOID)
    if c.n_group > 1:
        writer.add_expert_group_count(c.n_group)
        writer.add_expert_group_used_count(c.topk_group)


def converted(name: str, data: np.ndarray, c: Any, apart: bool) -> dict[str, np.ndarray]:
    """A tensor of a checkpoint as its converter passes it to gguf-py's name table."""
    if name.endswith("e_score_correction_bias"):
        return {f"{name.removesuffix('_bias')}.bias": data}
    if name.endswith("attention_sink_bias"):
        return {f"{name}.weight": data}
    if name.endswith((".down_proj", ".gate_up_proj")):  # stacks
        return {f"{name}.weight": data}
    if not apart or not name.endswith("kv_b_proj.weight"):
        return {name: data}
    keys, values = np.split(data.reshape(c.num_attention_heads, -1, data.shape[1]), [c.qk_nope_head_dim], axis=1)
    return {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): values}


def write(hf: Any, path: Path, apart: bool, quantize: bool = False) -> Path:
    c = hf.config
    architecture = ARCHITECTURES.get(c.model_type, "deepseek2")
    if c.model_type == "mistral4" and not c.rope_parameters["llama_4_scaling_beta"]:
        architecture = "mistral4"
    known = "glm-dsa" if architecture == "deepseek32" else architecture  # which gguf-py does not have yet
    known = "mistral4" if c.model_type == "mistral4" else known  # its stacks of gates and ups
    name_of = names_of(known, c.num_hidden_layers)
    with writing(path, architecture) as writer:
        add_keys(writer, c, apart)
        if architecture == "mimo2":
            for norm in ("attn_norm", "nextn.enorm"):
                writer.add_tensor(f"blk.{c.num_hidden_layers}.{norm}.weight", np.ones(c.hidden_size, np.float32))
        for name, array in converted_by(partial(converted, apart=apart), hf).items():
            kind = gguf.GGMLQuantizationType.Q8_0 if quantize and "gate_inp" not in name_of(name) else None
            add_quantized(writer, name_of(name), array, kind)
    return path


def made(config: dict[str, Any]) -> Any:
    config = dict(config)
    return randomized(causal_model(transformers, transformers.AutoConfig.for_model(config.pop("model_type"), **config)))


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_file_computes_what_its_folder_computes(tmp_path, name):
    config, apart = CASES[name]
    hf = made(config)
    folder, file = load(save(hf, tmp_path / "folder")), load(write(hf, tmp_path / "model.gguf", apart))
    assert type(file) is type(folder) or name == "glm4_moe_lite"  # a DeepSeek-V3 with other defaults
    ids = random_ids(100, 96)
    assert torch.equal(logits_of(file, ids), logits_of(folder, ids))


def test_layers_with_indexers_of_their_own_may_be_all(tmp_path):
    """The array of equal flags is read as one flag."""
    config, apart = CASES["glm_moe_dsa"]
    hf = made({**config, "indexer_types": ["full"] * config["num_hidden_layers"]})
    assert load(write(hf, tmp_path / "model.gguf", apart)).config.selects == (True,) * config["num_hidden_layers"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("apart", [True, False])
def test_the_matrices_of_heads_keep_their_format(tmp_path, apart):
    """A program computes with the file's blocks; of keys and values in one matrix, those of the values."""
    sizes = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "kv_lora_rank": 64, "v_head_dim": 32}
    sizes["first_k_dense_replace"] = 3  # an expert more or less chosen is no measure of rounding
    config, _ = CASES["deepseek_v3"]
    path = write(made({**config, **sizes}), tmp_path / "model.gguf", apart, quantize=True)
    loaded = load_model(find_model(str(path)), "float32", options=LoadOptions("program"))
    attn = loaded.model.layers[0].attn
    assert attn.key_up.weights["weight"].format == ("Q8_0" if apart else "F32")
    assert attn.value_up.weights["weight"].format == "Q8_0"
    assert any("decoded" in note for note in loaded.notes) is not apart
    ids = random_ids(60, 96)
    found = Driver(program_of(loaded), ids).logits(0, 60)
    eager = logits_of(load_model(find_model(str(path)), "float32").model, ids).numpy()
    assert np.square(found - eager).mean() < 0.08**2 * np.square(eager).mean()  # a program rounds rows to 8 bits
    parts = Driver(program_of(loaded, threads=2), ids)
    again = np.concatenate([parts.logits(0, 33), parts.logits(33, 1), parts.logits(34, 26)])
    assert np.array_equal(found.view(np.uint32), again.view(np.uint32))
