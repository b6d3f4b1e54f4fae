"""Architectures to classes: what we have is found by either name, what we lack is refused with a way on."""

import importlib
import sys
from pathlib import Path

import pytest

import kvasir
from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.registry import MODELS, model_class, model_class_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("model_type", MODELS)
def test_a_class_is_found_by_type_and_by_each_of_its_architectures(model_type):
    found = model_class(model_type)
    module, name, _ = MODELS[model_type]
    assert (found.__module__, found.__name__) == (f"kvasir.models.{module}", name)
    for architecture in MODELS[model_type][2]:
        assert model_class(architecture) is found
        assert model_class_for({"model_type": model_type, "architectures": [architecture]}) is found
    assert model_class_for({"architectures": [MODELS[model_type][2][0]]}) is found


def test_a_refusal_names_the_architecture_the_nearest_and_the_way():
    with pytest.raises(UnsupportedModel) as refused:
        model_class_for({"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]})
    text = str(refused.value)
    assert "qwen3_vl (Qwen3VLForConditionalGeneration)" in text
    assert "nearest supported: qwen3" in text
    assert "docs/howto/add-a-model.md" in text and (ROOT / "docs/howto/add-a-model.md").is_file()


def test_a_name_like_no_other_is_refused_with_the_nearest_nevertheless():
    with pytest.raises(UnsupportedModel, match=r"zzz.*nearest supported: \w+"):
        model_class("zzz")


def test_code_in_the_folder_is_not_run_and_the_refusal_names_it():
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    with pytest.raises(UnsupportedModel, match="auto_map"):
        model_class_for({"model_type": "evil", "auto_map": auto_map})
    ours = model_class_for({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "auto_map": auto_map})
    assert ours is model_class("llama")


@pytest.mark.parametrize("head", ["LlamaForQuestionAnswering", "LlamaForTokenClassification"])
def test_another_head_of_a_known_model_is_refused(head):
    with pytest.raises(UnsupportedModel, match=f"{head}.*llama"):
        model_class_for({"model_type": "llama", "architectures": [head]})


@pytest.mark.parametrize(
    "config", [{}, {"model_type": None}, {"architectures": "LlamaForCausalLM"}, {"architectures": [1]}]
)
def test_a_config_that_names_no_model_is_a_bad_file(config):
    with pytest.raises(ModelFileError):
        model_class_for(config)


@pytest.fixture
def _no_models():
    """As in a new process: without the modules of models that this one has imported."""
    before = {name: sys.modules.pop(name) for name in _models()}
    yield
    for name in _models():
        del sys.modules[name]
    sys.modules.update(before)
    kvasir.models = before["kvasir.models"]


def _models() -> list[str]:
    return [name for name in sys.modules if f"{name}.".startswith("kvasir.models.")]


@pytest.mark.usefixtures("_no_models")
def test_asking_for_one_model_imports_no_other():
    importlib.import_module("kvasir.models.registry").model_class("gpt2")
    assert "kvasir.models.gpt2" in _models()
    for other in ("llama", "mistral", "qwen2", "qwen3", "bert"):
        assert f"kvasir.models.{other}" not in _models()
