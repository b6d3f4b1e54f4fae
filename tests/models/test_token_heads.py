"""Embeddings and weights of tokens, as BGE-M3 has them: against torch, with the same bits in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.errors import ModelFileError
from kvasir.runner.load import LoadOptions, load_model
from kvasir.types import Request, Task
from kvasir.weights.find import find_model
from tests.engine.cores import core_of, random_model
from tests.models.test_classifiers import hidden
from tests.oracle import embed_requests, plain, same, together

SIZE = 24


def folder_of(path: Path, apart: bool = True) -> Path:
    """A random XLM-RoBERTa with both layers, in files of their own or beside the other tensors."""
    random_model("xlm-roberta", path)
    generator = torch.Generator().manual_seed(2)
    heads = {
        name: {"weight": torch.randn(size, 48, generator=generator) / 7, "bias": torch.randn(size, generator=generator)}
        for name, size in (("colbert_linear", SIZE), ("sparse_linear", 1))
    }
    if apart:
        for name, tensors in heads.items():
            save_file(tensors, path / f"{name}.safetensors")
        return path
    more = {f"{name}.{part}": tensor for name, tensors in heads.items() for part, tensor in tensors.items()}
    save_file({**load_file(path / "model.safetensors"), **more}, path / "model.safetensors")
    return path


def expected(folder: Path, rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and weights of the tokens with these hidden rows."""
    heads = {name: load_file(folder / f"{name}_linear.safetensors") for name in ("colbert", "sparse")}
    vectors, weights = (torch.nn.functional.linear(rows, head["weight"], head["bias"]) for head in heads.values())
    return torch.nn.functional.normalize(vectors, dim=-1).numpy(), torch.relu(weights).numpy()


def requests_for(task: Task) -> list[Request]:
    return [replace(request, id=f"{task}{i}", task=task) for i, request in enumerate(embed_requests(300))]


@pytest.mark.parametrize("executor", ["eager", "program"])
def test_embeddings_and_weights_of_tokens(tmp_path, executor):
    folder = folder_of(tmp_path)
    eager = load_model(find_model(str(folder)), "float32").model
    core = core_of(str(folder), dtype="float32", executor=executor, threads=1, max_num_seqs=1)
    assert core.info.tasks == (Task.EMBED, Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY)
    assert (core.info.embedding_size, core.info.token_embedding_size, core.info.token_weights) == (48, SIZE, True)
    for task, width in ((Task.TOKEN_EMBED, SIZE), (Task.TOKEN_CLASSIFY, 1)):
        requests = requests_for(task)
        answers = plain(core, requests)
        for request in requests:
            found = np.frombuffer(answers[request.id, 0].embedding or b"", np.float32).reshape(-1, width)
            rows = torch.from_numpy(hidden(eager, list(request.prompt_ids)))
            wanted = expected(folder, rows)[task is Task.TOKEN_CLASSIFY]
            assert found.shape == wanted.shape and np.abs(found - wanted).max() < 1e-4


@pytest.mark.parametrize("executor", ["eager", "program"])
def test_the_bits_do_not_depend_on_the_company(tmp_path, executor):
    folder = str(folder_of(tmp_path, apart=False))
    tasks = (Task.EMBED, Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY)
    requests = [request for task in tasks for request in requests_for(task)]
    answers = plain(core_of(folder, executor=executor, threads=1, max_num_seqs=1), requests)
    same(answers, together(core_of(folder, executor=executor, threads=2, block_size=16), requests))


@pytest.mark.parametrize("kind", ["distilbert", "nomic", "eurobert", "qwen3"])
def test_the_layers_belong_to_encoders(tmp_path, kind):
    """Decoders have none, and do not run as if they had."""
    random_model(kind, tmp_path)
    save_file({"weight": torch.zeros(8, 48), "bias": torch.zeros(8)}, tmp_path / "colbert_linear.safetensors")
    if kind in ("distilbert", "nomic"):
        assert load_model(find_model(str(tmp_path)), "float32").model.outputs == {Task.TOKEN_EMBED: "tokens"}
        return
    with pytest.raises(ModelFileError, match="colbert_linear"):
        load_model(find_model(str(tmp_path)), "float32")


def test_pickled_layers_are_not_read(tmp_path):
    folder = Path(random_model("xlm-roberta", tmp_path))
    (folder / "colbert_linear.pt").write_bytes(b"\x80\x04")
    loaded = load_model(find_model(str(folder)), "float32", options=LoadOptions("program"))
    assert loaded.model.tasks == (Task.EMBED,) and any("pickled" in note for note in loaded.notes)
