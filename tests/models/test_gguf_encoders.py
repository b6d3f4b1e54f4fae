"""GGUF files of encoders, written with gguf-py as llama.cpp's converters write them, give the bits of the folders that
they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.hf import load, save
from tests.models.oracle import state_of
from tests.models.test_encoders import hidden_of, ids_of, oracle

gguf = pytest.importorskip("gguf", reason="gguf is the oracle of these tests")
# In ENCODERS of test_encoders.py: the settings that a file can express.
ARCHITECTURES = {"roberta": "bert", "nomic": "nomic-bert"}


def write_gguf(hf: Any, path: Path, architecture: str) -> Path:
    c = hf.config
    number = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, c.num_hidden_layers)
    offset = 0 if architecture == "nomic-bert" else c.pad_token_id + 1  # positions that no token has
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings - offset)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_layer_norm_eps(c.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_token_type_count(c.type_vocab_size)
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    for name, tensor in published(hf).items():
        if "pooler" in name:
            continue
        data = tensor[offset:] if "position_embeddings" in name else tensor
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(data.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def published(hf: Any) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, under the names that Nomic publishes where the converter expects these."""
    return {name.removeprefix("nomic_bert."): tensor for name, tensor in state_of(hf).items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_computes_what_its_folder_computes(transformers, tmp_path, name):
    hf = oracle(transformers, name)
    folder = load(save(hf, tmp_path / "folder"))
    file = load(write_gguf(hf, tmp_path / "model.gguf", ARCHITECTURES[name]))
    assert file.config.pooling.kind == "mean"
    for count in (1, 90):
        ids = ids_of(count)
        assert torch.equal(hidden_of(file, [ids])[0], hidden_of(folder, [ids])[0])
