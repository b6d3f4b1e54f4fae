"""Folders of sentence-transformers: the modules that follow the transformer, against the same arithmetic in torch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvasir.errors import KvasirError, ModelFileError, UnsupportedModel
from kvasir.runner.load import LoadOptions, load_model
from kvasir.types import Task
from kvasir.weights.find import find_model
from tests.engine.cores import CONFIGS, core_of, random_model
from tests.models.test_classifiers import hidden
from tests.oracle import embed_requests, plain, same, together

IDS = [(7 * i * i + 3 * i + 1) % 290 + 5 for i in range(60)]
_TORCH = "torch.nn.modules."


def folder_of(
    path: Path, *dense: tuple[int, int, bool, str | None], kind: str = "bert", normalize: bool = True
) -> Path:
    """A random encoder with a pooling module and dense ones: (inputs, outputs, bias, activation)."""
    random_model(kind, path)
    names = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalize]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    generator = torch.Generator().manual_seed(1)
    for i, (inputs, outputs, bias, act) in enumerate(dense, 2):
        made = path / f"{i}_Dense"
        made.mkdir()
        config = {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": act}
        (made / "config.json").write_text(json.dumps(config))
        tensors = {"linear.weight": torch.randn(outputs, inputs, generator=generator) / inputs**0.5}
        tensors |= {"linear.bias": torch.randn(outputs, generator=generator)} if bias else {}
        save_file(tensors, made / "model.safetensors")
    return path


def embedding(folder: Path, rows: np.ndarray, acts: list[Any]) -> np.ndarray:
    """The embedding as torch computes it."""
    from safetensors.torch import load_file

    x = torch.from_numpy(rows).double().mean(0)
    for i, act in enumerate(acts, 2):
        tensors = {k: t.double() for k, t in load_file(folder / f"{i}_Dense/model.safetensors").items()}
        x = act(torch.nn.functional.linear(x, tensors["linear.weight"], tensors.get("linear.bias")))
    return (x / x.norm()).numpy()


@pytest.mark.parametrize("executor", ["eager", "program"])
def test_dense_modules_follow_pooling(tmp_path, executor):
    dense = [(48, 96, True, _TORCH + "activation.Tanh"), (96, 32, False, _TORCH + "linear.Identity")]
    folder = folder_of(tmp_path, *dense)
    eager = load_model(find_model(str(folder)), "float32").model
    rows = hidden(eager, IDS)
    expected = embedding(folder, rows, [torch.tanh, lambda x: x])
    model = load_model(find_model(str(folder)), "float32", options=LoadOptions(executor)).model
    found = model.pool(rows)
    assert found.shape == (32,) and found.dtype == np.float32
    assert np.abs(found - expected).max() < 1e-5
    assert model.tasks == (Task.EMBED, Task.TOKEN_EMBED)


def test_an_engine_gives_the_size_of_the_last_module_and_the_same_bits_in_any_company(tmp_path):
    folder = folder_of(tmp_path, (48, 96, True, _TORCH + "activation.GELU"), (96, 20, True, _TORCH + "activation.ReLU"))
    core = core_of(str(folder), threads=1, max_num_seqs=1)
    assert core.info.embedding_size == 20
    requests = embed_requests(300)
    expected = plain(core, requests)
    assert {len(answer.embedding or b"") for answer in expected.values()} == {4 * 20}
    same(expected, together(core_of(str(folder), threads=2, block_size=16), requests))


@pytest.mark.parametrize(
    ("dense", "change", "error"),
    [
        ((50, 96, True, _TORCH + "activation.Tanh"), {}, ModelFileError),
        ((48, 96, True, "os.system"), {}, UnsupportedModel),
        ((48, 96, True, None), {"out_features": 95}, ModelFileError),
        ((48, 96, True, None), {"bias": False}, ModelFileError),
        ((48, 96, False, None), {"bias": True}, ModelFileError),
        ((48, 96, False, None), {"in_features": "48"}, ModelFileError),
    ],
)
def test_modules_that_do_not_fit_are_refused(tmp_path, dense, change, error):
    folder = folder_of(tmp_path, dense)
    config = json.loads((folder / "2_Dense/config.json").read_text())
    (folder / "2_Dense/config.json").write_text(json.dumps(config | change))
    with pytest.raises(error):
        load_model(find_model(str(folder)), "float32")


@pytest.mark.parametrize("path", ["2_{0.__class__}", "2/Dense", "../2_Dense", "2 Dense"])
def test_a_folder_with_a_strange_name_is_refused(tmp_path, path):
    folder = folder_of(tmp_path, (48, 96, True, None))
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelFileError):
        load_model(find_model(str(folder)), "float32")


@pytest.mark.parametrize("pooling", [{"dense": [{"folder": "x"}]}, {"dense": "x"}, "x", ["dense"], {"kind": 3}])
def test_dense_layers_in_a_config_are_refused(tmp_path, pooling):
    folder = Path(random_model("bert", tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pooling": pooling}))
    with pytest.raises(KvasirError):
        load_model(find_model(str(folder)), "float32")


# --- rerankers that answer with a token -------------------------------------------------------------


def reranker(path: Path, kind: str = "qwen3", **config: Any) -> Path:
    """A random decoder whose folder names the tokens of its answer."""
    random_model(kind, path)
    names = [("", "base.modules.transformer.Transformer"), ("1_LogitScore", "cross_encoder.modules.LogitScore")]
    modules = [{"idx": i, "path": at, "type": f"sentence_transformers.{name}"} for i, (at, name) in enumerate(names)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir()
    tokens = {"true_token_id": 17, "false_token_id": 230}
    (path / "1_LogitScore/config.json").write_text(json.dumps(tokens | config))
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("false", "executor"), [(230, "eager"), (230, "program"), (None, "program")])
def test_the_score_of_a_reranker_is_the_difference_of_two_logits(tmp_path, monkeypatch, tied, false, executor):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(CONFIGS, "qwen3", CONFIGS["qwen3"] | {"tie_word_embeddings": tied})
    folder = reranker(tmp_path, false_token_id=false)
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    core = core_of(str(folder), dtype="float32", executor=executor, threads=1)
    assert core.info.tasks == (Task.CLASSIFY,)
    requests = [replace(r, task=Task.CLASSIFY) for r in embed_requests(300)]
    answers = together(core, requests)
    for request in requests:
        answer = answers[request.id, 0]
        with torch.no_grad():
            logits = hf(torch.tensor([request.prompt_ids])).logits[0, -1]
        score = logits[17] - (0 if false is None else logits[230])
        assert abs(np.frombuffer(answer.embedding or b"", np.float32)[0] - score) < 1e-4 * max(1, logits.abs().max())


@pytest.mark.parametrize("config", [{"true_token_id": 300}, {"true_token_id": "yes"}, {"false_token_id": -1}])
def test_tokens_that_the_vocabulary_lacks_are_refused(tmp_path, config):
    with pytest.raises(ModelFileError):
        load_model(find_model(str(reranker(tmp_path, **config))), "float32")


def test_a_score_of_tokens_needs_logits(tmp_path):
    with pytest.raises(UnsupportedModel, match="without logits"):
        load_model(find_model(str(reranker(tmp_path, "bert"))), "float32")


def test_the_activation_of_a_reranker(tmp_path):
    folder = reranker(tmp_path)
    assert load_model(find_model(str(folder)), "float32").model.config.pooling.activation == "sigmoid"
    about = {"model_type": "CrossEncoder", "activation_fn": _TORCH + "linear.Identity"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(about))
    assert load_model(find_model(str(folder)), "float32").model.config.pooling.activation == "identity"
