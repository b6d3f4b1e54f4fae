"""GPT-BigCode (StarCoder) against transformers, and its GGUF files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models.driver import logits_of
from tests.models.hf import load, randomized, save
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, random_ids

gguf = pytest.importorskip("gguf", reason="gguf is the oracle of these tests")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

SMALL = {"vocab_size": 97, "n_positions": 96, "n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4}


def oracle(**changes):
    return randomized(transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(**{**SMALL, **changes})))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"multi_query": False},
        {"activation_function": "gelu", "tie_word_embeddings": False},
        {"scale_attn_weights": False, "layer_norm_epsilon": 0.1},
    ],
)
def test_logits_agree_with_transformers(tmp_path, changes):
    hf, ids = oracle(**changes), random_ids(90, 97)
    model = load(save(hf, tmp_path))
    with torch.no_grad():
        expected = hf(torch.tensor([ids])).logits[0]
    found = logits_of(model, ids)
    assert distance(found, expected) < TOLERANCE
    assert torch.equal(logits_of(model, ids, chunks=(1, 31, 7)), found)


@pytest.mark.parametrize(
    "change", [{"activation_function": "relu"}, {"scale_attn_weights": False}, {"layer_norm_epsilon": 0.5}]
)
def test_every_field_moves_the_logits(tmp_path, change):
    ids = random_ids(60, 97)
    save(oracle(), tmp_path)
    assert distance(logits_of(load(tmp_path, **change), ids), logits_of(load(tmp_path), ids)) > SENSITIVITY


def test_a_file_computes_what_its_folder_computes(tmp_path):
    hf = oracle()
    folder, path = load(save(hf, tmp_path / "folder")), tmp_path / "model.gguf"
    writer, c = gguf.GGUFWriter(path, "starcoder"), hf.config
    writer.add_context_length(c.n_positions)
    writer.add_embedding_length(c.n_embd)
    writer.add_feed_forward_length(c.n_inner)
    writer.add_block_count(c.n_layer)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_eps(c.layer_norm_epsilon)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.STARCODER, c.n_layer)
    for name, tensor in hf.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ids = random_ids(90, 97)
    assert torch.equal(logits_of(load(path), ids), logits_of(folder, ids))
