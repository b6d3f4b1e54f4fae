"""Adapters of every kind that peft can make, served without merging, against peft's own logits on the CPU."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

peft = pytest.importorskip("peft", reason="peft is not installed")

import torch  # noqa: E402
import transformers  # noqa: E402

from kvasir.inputs import Adapter  # noqa: E402
from tests.engine.cores import CONFIGS, random_model  # noqa: E402
from tests.lora.made import bound  # noqa: E402
from tests.lora.served import adapted_core, log_probabilities  # noqa: E402
from tests.lora.test_served import log_softmax  # noqa: E402

EXECUTORS = ("eager", "program")
IDS = np.random.default_rng(3).permutation(300)[:40].tolist()  # all different
INVOCATION = IDS[30:32]
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "down_proj"]
TIED = {"tie_word_embeddings": True}
# name: the model, changes of its config, the fields of peft's config
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bias of b": ("llama", {}, {"target_modules": ["q_proj", "down_proj"], "lora_bias": True}),
    "some layers": (
        "llama",
        {},
        {"target_modules": ["v_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    ),
    "all linear": ("qwen3", {}, {"target_modules": "all-linear", "use_rslora": True}),
    "biases": ("qwen2", {}, {"target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}),
    "transposed": ("gpt2", {}, {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "dora of all": ("llama", {}, {"target_modules": [*EVERY, "lm_head"], "use_dora": True}),
    "dora of a table": ("llama", {}, {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "norms": ("llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm"]}),
    "offset norms": ("gemma2", {}, {"target_modules": ["q_proj"], "modules_to_save": ["post_feedforward_layernorm"]}),
    "norms of heads": ("qwen3", {}, {"target_modules": ["q_proj"], "modules_to_save": ["k_norm"]}),
    "linear saved": ("llama", {}, {"target_modules": ["q_proj"], "modules_to_save": ["up_proj", "embed_tokens"]}),
    "tied tokens": ("qwen3", TIED, {"target_modules": ["q_proj"], "trainable_token_indices": IDS[3:6]}),
    "tied table": (
        "qwen3",
        TIED,
        {"target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True},
    ),
    "table of a tied head": ("qwen3", TIED, {"target_modules": ["embed_tokens", "v_proj"]}),
    "scaled table": ("gemma3", TIED, {"target_modules": ["embed_tokens", "v_proj"]}),
    "tied saved": (
        "qwen3",
        TIED,
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "saved table of a tied head": ("qwen3", TIED, {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]}),
    "router": ("qwen3-moe", {}, {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "experts": ("qwen3-moe", {}, {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    "experts of gpt-oss": (
        "gpt-oss",
        {},
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "activated": ("llama", {}, {"target_modules": EVERY, "alora_invocation_tokens": INVOCATION}),
}
# name: the model, the fields of peft's config of two adapters. Two cannot be active in peft if both replace
# tensors, rows or biases
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": EVERY}, {"target_modules": ["q_proj", "down_proj"], "lora_bias": True}),
    "dora and plain": ("qwen2", {"target_modules": SOME, "use_dora": True}, {"target_modules": SOME}),
    "dora twice": (
        "qwen2",
        {"target_modules": SOME, "use_dora": True},
        {"target_modules": ["q_proj", "lm_head"], "use_dora": True, "use_rslora": True},
    ),
    "dora and plain, transposed": (
        "gpt2",
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
        {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    ),
    "tables": (
        "gemma3",
        {"target_modules": ["embed_tokens", "v_proj"], "use_dora": True},
        {"target_modules": ["embed_tokens", "v_proj"]},
    ),
    "one saves": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    ),
}


def write(kind: str, changes: dict[str, Any], adapters: dict[str, dict[str, Any]], folder: Path) -> tuple[Path, Any]:
    """A base model, and peft's model of it with adapters of these names and fields, which are in `folder`, too."""
    base = folder / "base"
    base.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, kind, {**CONFIGS[kind], **changes})
        random_model(kind, base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned: Any = None
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        for name, fields in adapters.items():
            fields = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", "target_modules": [], **fields}
            config = peft.LoraConfig(**fields)
            if tuned is None:
                tuned = peft.get_peft_model(model, config, name)
            else:
                tuned.add_adapter(name, config)
            tuned.set_adapter(name)
            for path, value in tuned.named_parameters():
                if value.requires_grad:
                    noise = torch.randn_like(value) * (0.3 if "lora_" in path and value.ndim > 1 else 0.05)
                    value.data += noise.abs() if "magnitude" in path else noise
        tuned.save_pretrained(folder)
    return base, tuned.eval()


def wanted_of(tuned: Any, *names: str) -> np.ndarray:
    """peft's log-probabilities with these adapters, in this order."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        tuned.base_model.set_adapter(list(names))
        return log_softmax(tuned(torch.tensor([IDS])).logits[0].numpy())


def config_of(base: Path) -> dict[str, Any]:
    return json.loads((base / "config.json").read_text())


@pytest.mark.few(5)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_those_of_peft(tmp_path, name, executor):
    kind, changes, fields = CASES[name]
    base, tuned = write(kind, changes, {"x": fields}, tmp_path)
    adapter, wanted = bound(tmp_path / "x", config_of(base)), wanted_of(tuned, "x")
    core = adapted_core(base, executor, {"x": adapter})
    start = IDS.index(INVOCATION[0]) if adapter.invocation else 0
    assert adapter.invocation == (tuple(INVOCATION) if name == "activated" else ())
    got, without = log_probabilities(core, IDS, Adapter("x", 1.0, start)), log_probabilities(core, IDS)
    assert np.nanmax(np.abs(got - wanted)) < 5e-5
    assert np.nanmax(np.abs(without - wanted)) > 1e-3, "the adapter changes nothing: the comparison says nothing"
    assert np.array_equal(got[:start], without[:start], equal_nan=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", PAIRS)
def test_two_adapters_are_those_of_peft_in_both_orders(tmp_path, name, executor):
    kind, *fields = PAIRS[name]
    base, tuned = write(kind, {}, dict(zip("xy", fields, strict=True)), tmp_path)
    core = adapted_core(base, executor, {one: bound(tmp_path / one, config_of(base)) for one in "xy"})
    got = {order: log_probabilities(core, IDS, *map(Adapter, order)) for order in ("xy", "yx", "x", "y")}
    for order, found in got.items():
        assert np.nanmax(np.abs(found - wanted_of(tuned, *order))) < 5e-5
    assert all(np.nanmax(np.abs(got["xy"] - got[one])) > 1e-3 for one in "xy"), "one of them changes nothing"
