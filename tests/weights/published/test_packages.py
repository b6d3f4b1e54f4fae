"""HQQ and torchao, where they are installed: what they write, decoded as they decode it, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from kvasir.layers.tensors import tensor_of  # noqa: E402
from kvasir.weights.published import unquantized  # noqa: E402
from kvasir.weights.source import SafetensorsSource, WeightSource  # noqa: E402
from tests.weights.published.encode import assert_same_packed  # noqa: E402


def opened(folder: Path, method: str, tensors: dict, metadata: dict[str, str] | None = None) -> WeightSource:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata)
    settings = {"quantization_config": {"quant_method": method}}
    return unquantized(settings, SafetensorsSource(folder / "model.safetensors"))[1]


def assert_decoded(source: WeightSource, name: str, expected, roundings: int = 1) -> None:
    found = tensor_of(np.ascontiguousarray(source.array(name)))
    assert torch.equal(found.float(), expected.detach().float())
    assert_same_packed(source, name, roundings)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_hqq(bits, axis, dtype, tmp_path):
    quantize = pytest.importorskip("hqq.core.quantize", reason="hqq is the oracle of this test")
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 128, bias=False).to(dtype)
    config = quantize.BaseQuantizeConfig(nbits=bits, group_size=64, axis=axis)
    made = quantize.HQQLinear(layer, config, compute_dtype=dtype, device="cpu")
    source = opened(tmp_path, "hqq", {f"a.{name}": torch.as_tensor(t) for name, t in made.state_dict().items()})
    assert_decoded(source, "a.weight", made.dequantize(), 2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(name, tmp_path):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is the oracle of this test")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False)).to(torch.bfloat16)
    quantization.quantize_(model, getattr(quantization, name)())
    tensors, metadata = support.flatten_tensor_state_dict(model.state_dict())
    assert "0._weight_qdata" in tensors and json.loads(metadata["tensor_names"]) == ["0.weight"]
    source = opened(tmp_path, "torchao", tensors, metadata)
    assert_decoded(source, "0.weight", model[0].weight.dequantize())


@pytest.mark.parametrize(("mode", "bits", "group"), [
    *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
    *(("affine", 4, 32), ("affine", 4, 128), ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mlx(mode, bits, group, dtype, tmp_path):
    """Up to a rounding of its own: MLX multiplies and adds in the dtype of the scales."""
    mx = pytest.importorskip("mlx.core", reason="mlx is the oracle of this test")
    mx.set_default_device(mx.cpu)
    weight = mx.array(np.random.default_rng(0).standard_normal((64, 256), np.float32)).astype(getattr(mx, dtype))
    codes, scales, *biases = mx.quantize(weight, group, bits, mode=mode)
    tensors = {"a.weight": codes, "a.scales": scales, **({"a.biases": biases[0]} if mode == "affine" else {})}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    settings = {"quantization": {"group_size": group, "bits": bits, "mode": mode}}
    source = unquantized(settings, SafetensorsSource(tmp_path / "model.safetensors"))[1]
    made = mx.dequantize(codes, scales, *biases, group_size=group, bits=bits, mode=mode)
    expected, found = np.array(made.astype(mx.float32)), source.array("a.weight").astype(np.float32)
    most = np.abs(expected).max(1, keepdims=True)
    assert (np.abs(found - expected) <= 2.0**-7 * most).all() and np.abs(found - expected).mean() < 4e-3
    assert_same_packed(source, "a.weight")
