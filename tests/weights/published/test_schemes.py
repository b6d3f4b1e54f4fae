"""Checkpoints whose schemes round activations, too: by the arithmetic of compressed-tensors, bit for bit."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvasir.ops import native  # noqa: E402
from kvasir.ops.linear.native import prepare  # noqa: E402
from kvasir.runner.load import LoadOptions, load_model  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from kvasir.weights.source import SafetensorsSource  # noqa: E402
from tests._shared import need  # noqa: E402
from tests.models.oracle import random_ids  # noqa: E402
from tests.ops.test_linear_int import groups_of  # noqa: E402
from tests.program.made import Driver, program_of  # noqa: E402
from tests.weights.published.test_made import opened  # noqa: E402

FIXTURES = {"ct_W8A8": "int8", "ct_FP8_DYNAMIC": "fp8", "ct_FP8_BLOCK": "fp8"}


def rounded(x: np.ndarray, scheme: dict, scale: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) by the package."""
    arguments = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs(**scheme)
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    tensor = torch.from_numpy(x)[None]
    if scale is None:
        scales, zero = compute_dynamic_scales_and_zp(tensor, arguments, torch.nn.Linear(x.shape[1], 1))
    else:
        scales, zero = torch.from_numpy(scale.astype(np.float32)), None
    return quantize(tensor, scales, zero, arguments).float().numpy(), scales.float().numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FIXTURES)
def test_rows_are_rounded_as_the_package_does(name):
    if not native.available():
        pytest.skip(native.reason())
    folder = need("fixtures", "quantized", name)
    scheme = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    model = load_model(find_model(str(folder)), "float32", options=LoadOptions("program"))
    assert any("are quantized by the file's scheme" in note for note in model.notes), model.notes
    matrix = model.model.layers[0].attn.qkv.weights["q"]
    assert matrix.inputs.rounding == FIXTURES[name]
    stored = SafetensorsSource(folder)
    static = "model.layers.0.self_attn.q_proj.input_scale"
    scale = stored.array(static) if static in set(stored.names()) else None
    x = np.random.default_rng(0).standard_normal((6, matrix.cols), np.float32)
    x[1, 5] = -9.0  # the largest: -127.5 steps, or saturated
    codes, scales = rounded(x, scheme["input_activations"], scale)
    codes = codes.reshape(x.shape)
    if FIXTURES[name] == "int8":
        groups = groups_of(matrix, x)
        assert np.array_equal(groups["q"].reshape(x.shape), codes)
        assert np.array_equal(groups["scale"].reshape(len(x), -1)[:, :1], scales.reshape(len(x), 1))
    else:
        each = scales.reshape(len(x), -1).repeat(x.shape[1] // (scales.size // len(x)), 1) if scale is None else scales
        assert np.array_equal(prepare(matrix, x).view(np.float32)[:, : matrix.cols], codes * each)
    ids = random_ids(40, 256)
    found = Driver(program_of(model), ids).logits(0, len(ids))
    driver = Driver(program_of(model, threads=2), ids)
    parts = np.concatenate([driver.logits(0, 1), driver.logits(1, 30), driver.logits(31, 9)])
    assert np.array_equal(parts.view(np.uint32), found.view(np.uint32))


def test_modelopt_with_static_scales(tmp_path):
    tensors = {
        "a__weight": np.ones((16, 128), ml_dtypes.float8_e4m3fn),
        "a__weight_scale": np.float32(0.5),
        "a__input_scale": np.float32(0.25),
    }
    source = opened(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"}, **tensors)
    assert source.info("a.weight").inputs == ("fp8", 0.25, 0, None)
    for scale in ("nan", "-1", "1e-21"):  # of a file that was not calibrated
        changed = tensors | {"a__input_scale": np.float32(scale)}
        source = opened(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"}, **changed)
        assert source.info("a.weight").inputs is None
