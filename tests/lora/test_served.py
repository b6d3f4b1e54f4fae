"""The eight kinds of adapters that peft wrote, served without merging, against the logits that peft computed."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvasir.inputs import Adapter
from tests._shared import need
from tests.lora.made import PREFIX, bound, write_gguf, write_mlx, write_peft
from tests.lora.served import adapted_core, log_probabilities
from tests.lora.test_fixtures import KINDS, base_of, config_of
from tests.lora.test_forms import pairs_from_halves


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("executor", ["eager", "program"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_peft(kind, executor):
    base = base_of(kind)
    adapter = bound(need("fixtures", "lora", kind), config_of(base))
    core = adapted_core(base, executor, {"x": adapter})
    expected = dict(np.load(need("fixtures", "lora", "expected.npz")))
    wanted = log_softmax(expected[kind])
    got = log_probabilities(core, expected["ids"].tolist(), Adapter("x"))
    assert np.nanmax(np.abs(got - wanted)) < 2e-5
    without = log_probabilities(core, expected["ids"].tolist())
    assert np.nanmax(np.abs(without - wanted)) > 1e-3, "the adapter changes nothing: the comparison says nothing"


def pairs_of(kind: str) -> dict[str, list[np.ndarray]]:
    """a and b of every module of an adapter that peft wrote."""
    arrays, found = load_file(need("fixtures", "lora", kind, "adapter_model.safetensors")), {}
    for name in sorted(arrays):
        found.setdefault(name.removeprefix(PREFIX).partition(".lora_")[0], []).append(arrays[name])
    return found


def test_other_forms_have_the_same_bits(tmp_path):
    base, folder = base_of("plain"), need("fixtures", "lora", "plain")
    config, heads = config_of(base), {"q": 4, "k": 2}
    given = json.loads((folder / "adapter_config.json").read_text())
    mlx, gguf = {}, {}
    for name, (a, b) in pairs_of("plain").items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj", name)
        assert found is not None
        layer, part = found.groups()
        mlx |= {f"{name}.lora_a": a.T, f"{name}.lora_b": b.T}
        rows = pairs_from_halves(b, heads[part]) if part in heads else b
        gguf |= {f"blk.{layer}.attn_{part}.weight.lora_a": a, f"blk.{layer}.attn_{part}.weight.lora_b": rows}
    values = {"rank": given["r"], "scale": given["lora_alpha"] / given["r"], "dropout": 0.0}
    paths = (
        folder,
        write_mlx(tmp_path / "mlx", mlx, lora_parameters=values),
        write_gguf(tmp_path / "a.gguf", gguf, float(given["lora_alpha"]), "llama"),
    )
    core = adapted_core(base, "eager", {path.name: bound(path, config) for path in paths})
    ids = np.arange(3, 40).tolist()
    first, *others = (log_probabilities(core, ids, Adapter(path.name)) for path in paths)
    assert not np.array_equal(first, log_probabilities(core, ids), equal_nan=True)
    assert all(np.array_equal(first, other, equal_nan=True) for other in others)


def test_experts_one_by_one_are_those_of_one_parameter(tmp_path):
    """As peft wrote them for models whose experts were modules."""
    base = base_of("moe_params")
    stacked = bound(need("fixtures", "lora", "moe_params"), config_of(base))
    names = {"gate_up.gate": "gate_proj", "gate_up.up": "up_proj", "down": "down_proj"}
    tensors, scales = {}, set()
    for slot, change in stacked.matrices.items():
        if found := re.fullmatch(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(.+)", slot):
            module = f"model.layers.{found[1]}.mlp.experts.{found[2]}.{names[found[3]]}"
        else:
            module = slot.replace("layers.0.attn.qkv.q", "model.layers.0.self_attn.q_proj")
        tensors |= {f"{module}.lora_A.weight": change.a, f"{module}.lora_B.weight": change.b}
        scales.add((change.rank, change.scale))
    ((rank, scale),) = scales
    path = write_peft(tmp_path / "x", tensors, r=rank, lora_alpha=scale * rank, target_modules=r".*_proj")
    core = adapted_core(base, "eager", {"one": bound(path, config_of(base)), "stack": stacked})
    ids = np.arange(3, 40).tolist()
    one, stack = (log_probabilities(core, ids, Adapter(name)) for name in ("one", "stack"))
    assert np.array_equal(one, stack, equal_nan=True)
