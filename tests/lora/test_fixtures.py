"""The eight kinds of adapters that peft wrote, against the logits that peft computed with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvasir.layers.adapters import linears
from kvasir.lora import bind, read_adapter
from kvasir.runner.eager_adapters import EagerAdapters
from kvasir.runner.load import open_checkpoint
from kvasir.weights.find import find_model
from tests._shared import need
from tests.lora.made import bound, empty, merged_model
from tests.models.driver import logits_of

KINDS = ("plain", "rslora_pat", "dora", "saved", "embed", "tok", "moe_params", "moe_router")


def base_of(kind: str) -> Path:
    return need("fixtures", "lora", "base-qwen3-moe" if kind.startswith("moe") else "base-llama")


def config_of(base: Path) -> dict:
    return open_checkpoint(find_model(base))[0]


def difference(base: Path, adapter, kind: str) -> float:
    expected = np.load(need("fixtures", "lora", "expected.npz"))
    logits = logits_of(merged_model(base, adapter), expected["ids"].tolist()).numpy()
    return float(np.abs(logits - expected[kind]).max() / np.abs(expected[kind]).max())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft(kind):
    base = base_of(kind)
    adapter = bound(need("fixtures", "lora", kind), config_of(base))
    assert difference(base, adapter, kind) < 1e-5
    assert difference(base, None, kind) > 1e-3, "the adapter changes nothing: the comparison says nothing"


def test_what_each_kind_changes():
    found = {}
    for kind in KINDS:
        adapter = bound(need("fixtures", "lora", kind), config_of(base_of(kind)))
        found[kind] = len(adapter.matrices), sorted((*adapter.tables, *adapter.saved, *adapter.tokens))
        assert adapter.kind == "peft" and not adapter.invocation
    assert found == {
        "plain": (4, []),
        "rslora_pat": (14, []),
        "dora": (4, []),
        "saved": (2, ["head.weight"]),
        "embed": (2, ["embed", "embed.weight"]),
        "tok": (2, ["embed"]),
        "moe_params": (1 + 3 * 4, []),
        "moe_router": (1, []),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_those_of_the_executors(kind):
    base = base_of(kind)
    adapter, model = bound(need("fixtures", "lora", kind), config_of(base)), merged_model(base, None)
    assert adapter.matrices.keys() <= linears(model).keys()
    adapters = EagerAdapters(model, "cpu")
    adapters.set(1, adapters.pack(adapter))
    for slot, change in adapter.matrices.items():
        linear, part = linears(model)[slot]
        pair = linear.changes[part].by_id[1].pair
        a = pair.a.transpose(0, 1).flatten(1)
        assert np.allclose((pair.b[0] @ a).numpy(), change.delta(), atol=1e-5)


def test_ranks_and_scales_follow_the_patterns():
    adapter = bound(need("fixtures", "lora", "rslora_pat"), config_of(base_of("plain")))
    matrices = adapter.matrices
    assert matrices["layers.0.attn.qkv.q"].rank == 4 and matrices["layers.0.attn.qkv.v"].rank == 8
    assert matrices["layers.0.attn.qkv.q"].scale == pytest.approx(16 / 4**0.5)
    assert matrices["layers.0.mlp.gate_up.up"].scale == pytest.approx(16 / 8**0.5)
    assert matrices["layers.1.mlp.gate_up.up"].scale == pytest.approx(32 / 8**0.5)


def test_matrices_are_views_of_the_file():
    adapter = bound(need("fixtures", "lora", "moe_params"), config_of(base_of("moe_params")))
    for change in adapter.matrices.values():
        assert not change.a.flags.owndata and not change.b.flags.owndata


def test_the_content_is_independent_of_name_and_folder(tmp_path):
    folder = need("fixtures", "lora", "plain")
    copy = tmp_path / "other"
    copy.mkdir()
    weights = (folder / "adapter_model.safetensors").read_bytes()
    config = json.loads((folder / "adapter_config.json").read_text())

    def content(data: bytes = weights, **changes) -> str:
        (copy / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        (copy / "adapter_model.safetensors").write_bytes(data)
        return read_adapter(copy).content

    original = read_adapter(folder).content
    assert content() == content(inference_mode=False, base_model_name_or_path="other") == original
    assert content(target_modules=["v_proj", "q_proj"]) == original
    others = [
        content(lora_alpha=8),
        content(use_rslora=True),
        content(alora_invocation_tokens=[3, 4]),
        content(weights[:-1] + b"\x01"),
    ]
    assert len({*others, original}) == 5


def test_reading_needs_no_torch():
    folder, base = need("fixtures", "lora", "moe_params"), base_of("moe_params")
    code = (
        "import sys; from kvasir.lora import bind, read_adapter; from kvasir.models.registry import model_class_for\n"
        "import json; config = json.load(open(sys.argv[2] + '/config.json')); kind = model_class_for(config)\n"
        "bind(read_adapter(sys.argv[1]), kind(kind.Config.from_hf(config)), config); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), str(base)], check=True, timeout=60)


def test_an_adapter_of_another_model_is_refused_by_name():
    config = config_of(base_of("moe_params"))
    with pytest.raises(ValueError, match=r"changes 'model\.layers\.1\..*', which Qwen3Moe does not have"):
        bind(read_adapter(need("fixtures", "lora", "plain")), empty(config), config)
