"""GGUF files of Gemma 3n and 4, written as llama.cpp's converters write them, give the bits of the folders that they
were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.errors import ModelFileError
from kvasir.models.gguf_gemma import put_share
from kvasir.models.gguf_view import HFView
from kvasir.weights.source import GGUFSource
from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.gguf_files import add_quantized, checkpoint_of, gguf, names_of, writing
from tests.models.hf import load, randomized, save
from tests.models.oracle import random_ids

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")


def without_factor(name: str) -> dict[str, Any]:
    """The family's config, without what a file cannot express."""
    config = config_of(name)
    config["rope_parameters"]["full_attention"].pop("factor")
    return config | {"attention_bias": False}


CONFIGS = {
    "gemma3n": config_of("gemma3n"),
    "gemma4": without_factor("gemma4"),
    "gemma4-moe": without_factor("gemma4-moe"),
    "gemma4-full": {**without_factor("gemma4-moe"), "layer_types": ["full_attention"] * 3},
}


# --- as the converters write --------------------------------------------------------------------------


def add_keys(writer: Any, c: Any) -> None:
    slides = [kind == "sliding_attention" for kind in c.layer_types]
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_head_count(c.num_attention_heads)
    if c.model_type == "gemma3n_text":
        add_gemma3n(writer, c)
    else:
        add_gemma4(writer, c)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(c.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(c.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(c.hidden_size_per_layer_input)
    if c.final_logit_softcapping:
        writer.add_final_logit_softcapping(c.final_logit_softcapping)


def add_gemma3n(writer: Any, c: Any) -> None:
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_altup_active_idx(c.altup_active_idx)
    writer.add_altup_num_inputs(c.altup_num_inputs)
    writer.add_activation_sparsity_scale(deviations(c))


def deviations(c: Any) -> list[float]:
    normal = torch.distributions.normal.Normal(0, 1)
    return [normal.icdf(torch.tensor(s, dtype=torch.float32)).item() for s in c.activation_sparsity_pattern]


def add_gemma4(writer: Any, c: Any) -> None:
    sizes = [c.per_layer_config[i] for i in range(c.num_hidden_layers)]
    full = next(size for size, kind in zip(sizes, c.layer_types, strict=True) if kind == "full_attention")
    local = c.to_dict()["head_dim"]
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(local)
    writer.add_head_count_kv([size.num_key_value_heads for size in sizes])
    reading = c.num_hidden_layers - c.num_kv_shared_layers
    inners = [c.intermediate_size * (2 if i >= reading else 1) for i in range(c.num_hidden_layers)]
    writer.add_feed_forward_length(inners if c.use_double_wide_mlp else c.intermediate_size)
    if c.enable_moe_block:
        writer.add_expert_count(c.num_experts)
        writer.add_expert_used_count(c.top_k_experts)
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    turning = int(full.head_dim * c.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * turning + [1e30] * (full.head_dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def converted(name: str, data: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor of a checkpoint under the name that its converter looks up, or the file's own."""
    layer = name.split(".")[2]
    if name.startswith(("model.altup_projections", "model.altup_unembed_projections")):
        return name.replace(f".{layer}.", "."), data
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale", data
    if name.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale", data
    if name.endswith(("layer_scalar", "_scale")) or name.endswith(("gate_up_proj", "experts.down_proj")):
        return f"{name}.weight", data
    return name, data


def write_gguf(hf: Any, path: Path, kind: Any = None) -> Path:
    """kind: the type of the matrices, by default that of the model."""
    c = hf.config
    architecture = c.model_type.removesuffix("_text")
    name_of, state = names_of(architecture, c.num_hidden_layers), checkpoint_of(hf)
    for part in ("altup_projections", "altup_unembed_projections"):
        if parts := [state.pop(name) for name in sorted(state) if f".{part}." in name]:
            state[f"model.{part}.0.weight"] = np.stack(parts)
    with writing(path, architecture) as writer:
        add_keys(writer, c)
        for name, tensor in state.items():
            new, data = converted(name, tensor)
            add_quantized(writer, name_of(new), data, kind)
    return path


def model_of(name: str) -> Any:
    config = dict(CONFIGS[name])
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    return randomized(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gemma3n"])
def test_a_file_computes_what_its_folder_computes(tmp_path, name):
    hf = model_of(name)
    folder = load(save(hf, tmp_path / "folder"))
    file = load(write_gguf(hf, tmp_path / "model.gguf"))
    assert type(file) is type(folder)
    ids = random_ids(100, 96)
    assert torch.equal(logits_of(file, ids), logits_of(folder, ids))


@pytest.mark.filterwarnings("ignore")
def test_quantized_experts_are_halves_of_the_stack(tmp_path):
    """The files' stacks of gates and ups, in Q8_0."""
    source = GGUFSource(write_gguf(model_of("gemma4-moe"), tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0))
    view = HFView(source, {}, "gemma4")
    stack = source.raw("blk.1.ffn_gate_up_exps.weight").reshape(6, 2, 24, -1)
    for half, part in enumerate(("gate", "up")):
        name = f"model.layers.1.experts.5.{part}_proj.weight"
        assert np.array_equal(view.raw(name), stack[5, half])
        assert view.info(name).shape == (24, 64) and view.array(name).shape == (24, 64)
    whole = source.array("blk.1.ffn_gate_up_exps.weight", 5)
    found = [view.array(f"model.layers.1.experts.5.{part}_proj.weight") for part in ("gate", "up")]
    assert np.array_equal(np.concatenate(found), whole)


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_gemma3n_computes_what_its_folder_computes(tmp_path):
    """torch and we invert the normal distribution with different roundings."""
    hf = model_of("gemma3n")
    cuts = [None if value == -np.inf else value for value in deviations(hf.config)]
    path = save(hf, tmp_path / "folder")
    for ours, theirs in zip(load(path).config.deviations, cuts, strict=True):
        assert ours == (None if theirs is None else pytest.approx(theirs, rel=1e-6))
    folder, file = load(path, activation_sparsity_scale=cuts), load(write_gguf(hf, tmp_path / "model.gguf"))
    assert type(file) is type(folder)
    ids = random_ids(100, 96)
    assert torch.equal(logits_of(file, ids), logits_of(folder, ids))


@pytest.mark.parametrize("factors", [[1.0] * 7 + [1e30], [2.0] * 8 + [1e30] * 8, [1e30] + [1.0] * 15])
def test_other_factors_are_refused(factors):
    config = {"global_head_dim": 32, "rope_parameters": {"full_attention": {}}}
    with pytest.raises(ModelFileError, match="rope_freqs"):
        put_share(config, factors)
