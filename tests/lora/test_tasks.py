"""Adapters for tasks in a model's own checkpoint, against the model with each of them merged."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvasir import LLM
from kvasir.config import EngineOptions
from kvasir.engine.load_text import load_tasks
from kvasir.errors import ModelFileError
from kvasir.lora import read_adapter
from tests.lora.made import bound

TASKS = ["retrieval.query", "separation"]
RANK, ALPHA, SIZE, INNER, VOCAB = 2, 3, 8, 16, 32
CONFIG: dict[str, Any] = {
    **{"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary"},
    **{"rotary_emb_base": 50.0, "hidden_size": SIZE, "intermediate_size": INNER, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 66, "type_vocab_size": 1},
    **{"lora_rank": RANK, "lora_alpha": ALPHA, "lora_adaptations": TASKS},
}
LINEARS = {"mixer.Wqkv": (3 * SIZE, SIZE), "mixer.out_proj": (SIZE, SIZE), "mlp.fc1": (INNER, SIZE)}
LINEARS |= {"mlp.fc2": (SIZE, INNER)}
TABLES = {"roberta.embeddings.word_embeddings": VOCAB, "roberta.embeddings.token_type_embeddings": 1}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint as it is published."""
    draw = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return draw.normal(0, 0.3, shape).astype(np.float32)

    found: dict[str, np.ndarray] = {}
    for layer in range(2):
        name = f"roberta.encoder.layers.{layer}"
        for part, (outputs, inputs) in LINEARS.items():
            found[f"{name}.{part}.bias"] = random(outputs)
            found |= adapted(f"{name}.{part}", random(outputs, inputs), (RANK, inputs), (outputs, RANK), random)
        for norm in ("norm1", "norm2"):
            found |= {f"{name}.{norm}.weight": 1 + random(SIZE), f"{name}.{norm}.bias": random(SIZE)}
    found |= {"roberta.emb_ln.weight": 1 + random(SIZE), "roberta.emb_ln.bias": random(SIZE)}
    for name, rows in TABLES.items():
        found |= adapted(name, random(rows, SIZE), (rows, RANK), (RANK, SIZE), random)
    found |= adapted("roberta.pooler.dense", random(SIZE, SIZE), (RANK, SIZE), (SIZE, RANK), random)
    return found | {"roberta.pooler.dense.bias": random(SIZE)}


def adapted(name: str, weight: np.ndarray, a: tuple, b: tuple, random: Any) -> dict[str, np.ndarray]:
    found = {f"{name}.parametrizations.weight.original": weight}
    for part, shape in (("A", a), ("B", b)):
        found[f"{name}.parametrizations.weight.0.lora_{part}"] = random(len(TASKS), *shape)
    return found


def merged(state: dict[str, np.ndarray], task: int | None) -> dict[str, np.ndarray]:
    """The same with a task's adapter in the weights."""
    found = {}
    for name, tensor in state.items():
        module, mark, rest = name.partition(".parametrizations.weight.")
        if not mark:
            found[name] = tensor
        elif rest == "original":
            a, b = (state[f"{module}{mark}0.lora_{part}"] for part in "AB")
            change = 0 if task is None else (a[task] @ b[task] if module in TABLES else b[task] @ a[task])
            found[f"{module}.weight"] = tensor + np.float32(ALPHA / RANK) * change
    return found


def write(folder: Path, state: dict[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file({name: np.ascontiguousarray(t) for name, t in state.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("tasks") / "model", tensors())


@pytest.mark.parametrize("executor", ["program", "eager"])
def test_a_task_is_the_model_with_its_adapter_merged(model, tmp_path, executor):
    pytest.importorskip("torch" if executor == "eager" else "numpy")
    options: dict[str, Any] = {"executor": executor, "dtype": "float32", "progress": False, "threads": 1}
    ids = list(range(3, 23))
    state = tensors()
    with LLM(str(model), **options) as llm:
        assert [info.name for info in llm.adapters] == TASKS
        found = [llm.embed([ids], lora=task)[0].embedding for task in (None, *TASKS)]
    for task, embedding in zip((None, 0, 1), found, strict=True):
        with LLM(str(write(tmp_path / f"merged-{task}", merged(state, task), lora_adaptations=None)), **options) as llm:
            assert llm.adapters == ()
            assert np.abs(np.array(llm.embed([ids])[0].embedding) - embedding).max() < 1e-5
    assert min(np.abs(np.subtract(one, other)).max() for one, other in pairwise(found)) > 1e-3


def test_every_matrix_and_table_that_is_used_changes(model):
    adapter = bound(Path(f"{model}#separation"), CONFIG)
    assert len(adapter.matrices) == 2 * 6 and set(adapter.tables) == {"embed"}
    assert adapter.max_rank == RANK + 1 and {change.scale for change in adapter.matrices.values()} == {ALPHA / RANK}
    first, second = (read_adapter(f"{model}#{task}") for task in TASKS)
    assert first.content != second.content


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_adaptations": ["other"]}, "no task 'separation'"),
        ({"lora_adaptations": None}, "this model has none"),
        ({"lora_adaptations": [*TASKS, "third"]}, "expected \\[3, ...\\]"),
        ({"lora_rank": 0}, "lora_rank is 0"),
        ({"lora_rank": 3}, "shapes"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, config, message):
    folder = write(tmp_path / "model", tensors(), **config)
    with pytest.raises(ModelFileError, match=message):
        read_adapter(f"{folder}#separation")


def test_missing_halves_and_models_without_tasks_are_refused(tmp_path):
    state = tensors()
    one = write(
        tmp_path / "one",
        {name: t for name, t in state.items() if not name.endswith("1.mlp.fc1.parametrizations.weight.0.lora_B")},
    )
    with pytest.raises(ModelFileError, match="only lora_A"):
        read_adapter(f"{one}#separation")
    none = write(tmp_path / "none", merged(state, None))
    with pytest.raises(ModelFileError, match="no tensor of an adapter"):
        read_adapter(f"{none}#separation")
    with pytest.raises(ModelFileError):
        read_adapter(f"{tmp_path}/nowhere#separation")


@pytest.mark.parametrize("names", [None, "x", {}, [], ["../x", 7, None, "a/b"], ["x"] * 100])
def test_tasks_of_a_hostile_config(tmp_path, names):
    assert load_tasks(EngineOptions(str(write(tmp_path / "m", {}, lora_adaptations=names)))) == ()
    assert load_file(tmp_path / "m" / "model.safetensors") == {}
