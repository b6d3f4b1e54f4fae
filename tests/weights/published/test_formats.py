"""A trained model in every published format: as a program that keeps the codes, and decoded.

packed     the program against the same weights decoded to float32: what rounding the rows costs
decoded    the eager executor against the model before quantization: what the format costs
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")

from kvasir.layers.tensors import tensor_of
from kvasir.ops import native
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model
from kvasir.weights.source import SafetensorsSource
from tests.models.driver import logits_of
from tests.program.made import Driver, program_of
from tests.program.mini import FOLDER, ids_of
from tests.program.test_quantized import error
from tests.weights.published.encode import FORMATS, write

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")


class Bound(NamedTuple):
    """packed: the format of the matrices. rms: of the difference of logits, relative to the rms of logits."""

    packed: str
    rms_packed: float
    rms_decoded: float


# Just above what was measured.
BOUNDS = {
    "gptq": Bound("Q4_0", 0.0105, 0.14),
    "gptq-asymmetric": Bound("INT4_ZP", 0.0105, 0.135),
    "gptq-act-order": Bound("INT4_ZP", 0.0105, 0.135),
    "awq": Bound("INT4_ZP", 0.0105, 0.135),
    "awq-gemv": Bound("INT4_ZP", 0.0105, 0.135),
    "w4a16": Bound("Q4_0", 0.0105, 0.145),
    "w4a16-asymmetric": Bound("INT4_ZP", 0.0105, 0.135),
    "w4a16-act-order": Bound("INT4_ZP", 0.0105, 0.135),
    "w8a8": Bound("INT8", 0.0105, 0.011),
    "fp8": Bound("FP8", 0.0025, 0.035),
    "fp8-blocks": Bound("FP8", 0.0025, 0.038),
    "nvfp4": Bound("NVFP4", 0.0105, 0.125),
    "mxfp4": Bound("MXFP4", 0.0105, 0.15),
    "mxfp8": Bound("BF16", 1e-5, 0.036),
    "bnb-fp4": Bound("BF16", 1e-5, 0.15),
    "nf4": Bound("NF4", 0.0105, 0.115),
    "nf4-nested": Bound("NF4", 0.0105, 0.115),
    "llm-int8": Bound("INT8", 0.0105, 0.011),
    "mlx-4": Bound("AFFINE4", 0.012, 0.145),
    "mlx-8": Bound("AFFINE8", 0.012, 0.0095),
    "hqq": Bound("INT4_ZP", 0.0105, 0.12),
}
FAST = ("awq", "fp8-blocks", "nf4", "mlx-4", "nvfp4")  # a kind of kernel each


@pytest.fixture(scope="module")
def mini() -> tuple[dict, dict[str, np.ndarray], np.ndarray]:
    """The config, the tensors and the logits of the model before quantization."""
    source = SafetensorsSource(FOLDER)
    tensors = {name: tensor_of(source.array(name)).float().numpy() for name in source.names()}
    config = json.loads((FOLDER / "config.json").read_text())
    return config, tensors, logits_of(load_model(find_model(str(FOLDER)), "float32").model, ids_of()).numpy()


def loaded(folder: Path, executor: str):
    options = LoadOptions("program") if executor == "program" else LoadOptions()
    return load_model(find_model(str(folder)), "float32", options=options)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_a_trained_model(name, mini, tmp_path):
    config, tensors, original = mini
    folder, bound = write(tmp_path / name, config, tensors, name), BOUNDS[name]
    model = loaded(folder, "program")
    assert set(model.formats) <= {bound.packed, "BF16"} and bound.packed in model.formats
    stored = "NVFP4_SCALED" if bound.packed == "NVFP4" else bound.packed
    assert any(f"{29 if FORMATS[name].embeds else 28} as {stored}" in note for note in model.notes), model.notes
    found = Driver(program_of(model), ids_of()).logits(0, len(ids_of()))
    decoded = logits_of(loaded(folder, "eager").model, ids_of()).numpy()
    packed, format = error(found, decoded, ids_of()), error(decoded, original, ids_of())
    print(f"{name}: packed {packed}, decoded {format}")  # for docs/quantization.md
    assert packed.rms < bound.rms_packed and format.rms < bound.rms_decoded, (packed, format)
    driven, parts, start = Driver(program_of(model, threads=2, fill=np.nan), ids_of()), [], 0
    for count in (1, 30, len(ids_of()) - 31):
        parts.append(driven.logits(start, count))
        start += count
    assert np.array_equal(np.concatenate(parts).view(np.uint32), found.view(np.uint32))
