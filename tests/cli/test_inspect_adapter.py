"""Inspect of adapters."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.errors import ConfigError, ModelFileError, UnsupportedModel
from tests._shared import need


def inspect(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    if result.exception:
        raise result.exception
    return result.output


def test_an_adapter_and_its_model():
    folder, base = need("fixtures", "lora", "rslora_pat"), need("fixtures", "lora", "base-llama")
    facts = json.loads(inspect(folder, "--model", base, "--json", "--tensors"))
    assert (facts["kind"], facts["ranks"], facts["dora"]) == ("peft", [4, 8], False)
    assert facts["changes"]["matrices"] == 14 == len(facts["updates"]) == sum(m["matrices"] for m in facts["modules"])
    assert len(facts["content"]) == 64
    assert facts["bytes"] == sum(4 * (u["a"][0] * u["a"][1] + u["b"][0] * u["b"][1]) for u in facts["updates"])
    text = inspect(folder)
    assert "model.layers.*.self_attn.q_proj" in text and facts["content"] in text and "fits" not in text


def test_kinds_have_lines_of_their_own():
    assert "whole tensors" in inspect(need("fixtures", "lora", "saved"))
    assert "2 of model.embed_tokens" in inspect(need("fixtures", "lora", "tok"))
    assert "DoRA" in inspect(need("fixtures", "lora", "dora"))
    fits = inspect(need("fixtures", "lora", "moe_params"), "--model", need("fixtures", "lora", "base-qwen3-moe"))
    assert "13 of its matrices change" in fits and "experts.gate_up_proj" in fits


def test_what_does_not_fit_is_refused(tmp_path):
    folder = need("fixtures", "lora", "plain")
    with pytest.raises(ModelFileError, match="Qwen3Moe does not have"):
        inspect(folder, "--model", need("fixtures", "lora", "base-qwen3-moe"))
    with pytest.raises(ConfigError, match="no program"):
        inspect(folder, "--program")
    with pytest.raises(ConfigError, match="--model is for inspecting an adapter"):
        inspect("kvasir-mini", "--model", "kvasir-mini")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(UnsupportedModel, match="IA3"):
        inspect(tmp_path)
