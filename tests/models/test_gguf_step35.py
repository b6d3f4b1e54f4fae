"""GGUF files of Step-3.5, written with gguf-py as llama.cpp's converter writes them, compute what the folders that they
were made from do: the converter adds 1 to the norms' weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.driver import logits_of
from tests.models.families import config_of
from tests.models.gguf_files import add_tensors, converted_by, names_of, writing
from tests.models.hf import load, save
from tests.models.oracle import TOLERANCE, distance, random_ids, randomized
from tests.models.step3p5_text import Step3p5ForCausalLM

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")


def converted(name: str, data: np.ndarray, c: Any) -> dict[str, np.ndarray]:
    data = data + np.float32(1) if name.endswith("norm.weight") else data
    return {f"{name}.bias" if name.endswith("router_bias") else name: data}


def add_keys(writer: Any, c: Any) -> None:
    slides, ropes = [kind == "sliding_attention" for kind in c.layer_types], c.rope_parameters
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count([c.per_layer_config[i].num_attention_heads for i in range(len(slides))])
    writer.add_head_count_kv([c.num_key_value_heads] * len(slides))
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern(slides)
    writer.add_expert_count(c.n_routed_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(c.share_expert_dim)
    writer.add_expert_weights_scale(c.moe_router_scaling_factor)
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(c.mlp_layer_types.index("sparse"))
    writer.add_moe_every_n_layers(1)
    writer.add_swiglu_clamp_exp(c.swiglu_limits)
    writer.add_swiglu_clamp_shexp(c.swiglu_limits_shared)


def write(hf: Any, path: Path) -> Path:
    c = hf.config
    with writing(path, "step35") as writer:
        add_keys(writer, c)
        turns = hf.model.rotary_emb.full_attention_inv_freq.double().numpy()
        plain = c.rope_parameters["full_attention"]["rope_theta"] ** (-np.arange(len(turns)) / len(turns))
        factors = np.ones(c.head_dim // 2, np.float32)
        factors[: len(turns)] = plain / turns
        writer.add_tensor("rope_freqs.weight", factors)
        add_tensors(writer, names_of("step35", c.num_hidden_layers), converted_by(converted, hf))
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["step3p5"])
def test_a_file_computes_what_its_folder_computes(tmp_path, name):
    config = config_of(name)
    hf = randomized(Step3p5ForCausalLM(transformers.AutoConfig.for_model(config.pop("model_type"), **config)))
    folder = load(save(hf, tmp_path / "folder"))
    file = load(write(hf, tmp_path / "model.gguf"))
    assert type(file) is type(folder)
    ids = random_ids(100, 96)
    assert distance(logits_of(file, ids), logits_of(folder, ids)) < TOLERANCE  # w + 1 - 1 is not w
    a, b = file.config, folder.config
    for name in ("windows", "sparse", "limits", "shared_limits", "window_heads", "routing", "window_theta"):
        assert getattr(a, name) == getattr(b, name)
