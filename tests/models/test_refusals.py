"""What cannot be computed is refused by name: families without code, and fields of a config that no code reads."""

from __future__ import annotations

import re

import pytest

from kvasir.errors import UnsupportedModel
from kvasir.models.gguf_config import hf_config_from_gguf
from kvasir.models.gguf_names import FAMILIES as ARCHITECTURES
from kvasir.models.registry import MODELS, model_class_for
from tests.models.families import FAMILIES, config_of

# Types whose configs hold those of several models are read in parts.
FIELDS = {"attention_wobble": 0.5, "moe_shuffles": 3, "rope_spiral": "tight"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_that_no_code_reads_is_refused_by_name(name):
    config = config_of(name)
    kind = model_class_for(config)
    assert kind.Config.from_hf(config)
    for field, value in FIELDS.items():
        with pytest.raises(UnsupportedModel, match=field):
            kind.Config.from_hf(config | {field: value})


def test_every_type_of_transformers_runs_or_is_refused_by_name():
    pytest.importorskip("transformers")
    from tests.models.cover import text_types

    missing = text_types() - MODELS.keys()
    assert len(missing) > 50
    for model_type in missing:
        with pytest.raises(UnsupportedModel) as refused:
            model_class_for({"model_type": model_type})
        text = str(refused.value)
        assert f"no code for the architecture {model_type}" in text
        named = re.search(r"supported: ([^;]*);", text)
        assert named and all(name in MODELS or name.endswith(_HEADS) for name in named[1].split(", ")), text


_HEADS = ("LM", "Model", "Classification", "Generation", "Training", "PreTraining")


@pytest.mark.parametrize(
    ("architecture", "near"), [("falcon-h9", "falcon"), ("llama5", "llama4"), ("qwen4moe", "qwen3moe")]
)
def test_an_architecture_of_a_file_is_refused_with_the_nearest_of_files(architecture, near):
    with pytest.raises(UnsupportedModel, match=rf"{architecture}.*nearest supported: .*{near}"):
        hf_config_from_gguf({"general.architecture": architecture}, None)  # type: ignore[arg-type]
    assert near in ARCHITECTURES
