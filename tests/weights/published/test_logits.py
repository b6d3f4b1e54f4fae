"""Logits of the reference packages' files against transformers with weights that this module decodes itself.

eager      the weights are rounded to bfloat16 where the package does that; the rows are float32
program    the weights are the codes times their scales, and hooks round the rows of each matrix as its kernel does.
           Where a value lies so close to the middle of two codes that float32 decides, all that follows differs: that
           happens in some prompts
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle of this test")

from kvasir.ops import native  # noqa: E402
from kvasir.runner.load import LoadOptions, load_model  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from kvasir.weights.source import SafetensorsSource  # noqa: E402
from tests._shared import need  # noqa: E402
from tests.models.driver import logits_of  # noqa: E402
from tests.models.oracle import distance, random_ids  # noqa: E402
from tests.program.made import Driver, program_of  # noqa: E402

Tensors = dict[str, np.ndarray]
Rows = Callable[[np.ndarray], np.ndarray]
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = ml_dtypes.float8_e4m3fn
THRESHOLD = 2.0  # of LLM.int8: some values of each row are outliers

# --- weights, float64 -------------------------------------------------------------------------------


def wide(numbers: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Numbers of rows, columns or blocks, for each value of a matrix."""
    numbers = numbers.astype(np.float64).reshape((1, 1) if numbers.size == 1 else numbers.shape)
    rows, cols = -(-shape[0] // numbers.shape[0]), -(-shape[1] // numbers.shape[1])
    return numbers.repeat(rows, 0).repeat(cols, 1)[: shape[0], : shape[1]]


def fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of `bits` bits, the lowest first."""
    shifts = np.arange(0, 8 * words.itemsize, bits)
    codes = words.astype(np.int64)[..., None] >> shifts & (1 << bits) - 1
    return codes.reshape(*words.shape[:-1], -1)


def integers(t: Tensors) -> np.ndarray:
    cols = int(t["weight_shape"][1])
    codes = fields(t["weight_packed"], t["weight_packed"].shape[1] * 32 // cols)
    zeros = np.full((1, 1), codes.max() // 2 + 1)
    if "weight_zero_point" in t:
        zeros = fields(np.ascontiguousarray(t["weight_zero_point"].T), 4).T
    return (codes - wide(zeros, codes.shape)) * wide(t["weight_scale"], codes.shape)


def scaled(t: Tensors) -> np.ndarray:
    return t["weight"].astype(np.float64) * wide(t["weight_scale"], t["weight"].shape)


def mxfp8(t: Tensors) -> np.ndarray:
    exponents = t["weight_scale"].astype(np.float64) - 127
    return t["weight"].astype(np.float64) * wide(np.exp2(exponents), t["weight"].shape)


def fp4(t: Tensors) -> np.ndarray:
    values, scales = FP4[fields(t["weight_packed"], 4)], t["weight_scale"]
    if "weight_global_scale" not in t:
        return values * wide(np.exp2(scales.astype(np.float64) - 127), values.shape)
    return values * wide(scales.astype(np.float64) / np.float64(t["weight_global_scale"][0]), values.shape)


def llm_int8(t: Tensors) -> np.ndarray:
    return t["weight"].astype(np.float64) * t["SCB"].astype(np.float64)[:, None] / 127


def nf4(t: Tensors, table: np.ndarray | None = None) -> np.ndarray:
    table = t["weight.quant_map"] if table is None else table
    state = json.loads(bytes(t["weight.quant_state.bitsandbytes__nf4"]))
    scales = t["weight.nested_quant_map"][t["weight.absmax"]].astype(np.float64)
    nested = t["weight.nested_absmax"].repeat(state["nested_blocksize"])[: len(scales)]
    each = scales * nested + state["nested_offset"]
    pairs = t["weight"].reshape(-1)
    codes = np.stack((pairs >> 4, pairs & 15), axis=-1).reshape(-1)
    return (table[codes] * each.repeat(state["blocksize"])).reshape(state["shape"])


def nf4_of_kernels(t: Tensors) -> np.ndarray:
    """The table in multiples of 2^-13."""
    return nf4(t, np.rint(t["weight.quant_map"].astype(np.float64) * 8192) / 8192)


# --- rows -------------------------------------------------------------------------------------------


def as_they_are(x: np.ndarray) -> np.ndarray:
    return x


def by_32(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(*x.shape[:-1], -1, 32)
    most = np.abs(groups).max(-1, keepdims=True)
    return (np.rint(groups * (np.float32(127) / most)) * (most / np.float32(127))).reshape(x.shape)


def int8(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127.5)
    return np.rint(np.clip(x / scale, -128, 127)) * scale


def fp8(x: np.ndarray, group: int | None = None) -> np.ndarray:
    groups = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(448)
    return (np.clip(groups / scale, -448, 448).astype(E4M3).astype(np.float32) * scale).reshape(x.shape)


def fp8_by_128(x: np.ndarray) -> np.ndarray:
    return fp8(x, 128)


def with_outliers(x: np.ndarray) -> np.ndarray:
    kept = np.abs(x) >= THRESHOLD
    others = np.where(kept, np.float32(0), x)
    most = np.abs(others).max(-1, keepdims=True)
    return np.where(kept, x, np.rint(others * (np.float32(127) / most)) * (most / np.float32(127)))


class Case(NamedTuple):
    """is_rounded: whether the package's weights are bfloat16, where they have no packed format with their values.
    kernels: the weights of kernels, if they differ. threshold: of LLM.int8, in the
    place of the file's."""

    weights: Callable[[Tensors], np.ndarray]
    rows: Rows
    is_rounded: bool = True
    kernels: Callable[[Tensors], np.ndarray] | None = None
    threshold: float | None = None


CASES = {
    "ct_W4A16": Case(integers, by_32, False),
    "ct_W4A16_ASYM": Case(integers, by_32, False),
    "ct_W8A16": Case(integers, by_32, False),
    "ct_W8A8": Case(scaled, int8),
    "ct_FP8": Case(scaled, as_they_are),
    "ct_FP8_DYNAMIC": Case(scaled, fp8),
    "ct_FP8_BLOCK": Case(scaled, fp8_by_128),
    "ct_MXFP8": Case(mxfp8, as_they_are),
    "ct_NVFP4": Case(fp4, by_32),
    "ct_NVFP4A16": Case(fp4, by_32),
    "ct_MXFP4": Case(fp4, by_32, False),
    "ct_MXFP4A16": Case(fp4, by_32, False),
    "bnb_nf4": Case(nf4, by_32, kernels=nf4_of_kernels),
    "bnb_int8": Case(llm_int8, with_outliers, threshold=THRESHOLD),
}
FAST = ("ct_W4A16_ASYM", "ct_FP8_BLOCK", "bnb_int8")


def reference(tensors: Tensors, config: dict, weights: Callable[[Tensors], np.ndarray], rounded: bool):
    """transformers' model in float32."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    state = {}
    for name in model.state_dict():
        if name in tensors and tensors[name].dtype.name in ("bfloat16", "float32"):
            values = tensors[name]
        else:
            stem = name.removesuffix("weight")
            values = weights({n.removeprefix(stem): t for n, t in tensors.items() if n.startswith(stem)})
            values = values.astype(ml_dtypes.bfloat16) if rounded else values
        state[name] = torch.from_numpy(values.astype(np.float32))
    model.load_state_dict(state)
    return model


def logits(model, ids: list[int]):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES
])  # fmt: skip
def test_logits(name, tmp_path):
    folder, case = need("fixtures", "quantized", name), CASES[name]
    config = json.loads((folder / "config.json").read_text())
    if case.threshold is not None:
        config["quantization_config"]["llm_int8_threshold"] = case.threshold
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    del config["quantization_config"]
    source = SafetensorsSource(folder)
    tensors, ids = {n: source.array(n) for n in source.names()}, random_ids(60, 256)
    expected = logits(reference(tensors, config, case.weights, case.is_rounded), ids)
    assert distance(logits_of(load_model(find_model(str(tmp_path)), "float32").model, ids), expected) < 1e-4
    if not native.available():
        return
    program = program_of(load_model(find_model(str(tmp_path)), "float32", options=LoadOptions("program")))
    theirs = reference(tensors, config, case.kernels or case.weights, False)
    prompts = [ids[i : i + 3] for i in range(0, len(ids), 3)]
    found = [torch.from_numpy(Driver(program, prompt).logits(0, 3).copy()) for prompt in prompts]
    plain = [distance(logits(theirs, prompt), ours) for prompt, ours in zip(prompts, found, strict=True)]
    for layer in theirs.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, args: (torch.from_numpy(case.rows(args[0].numpy())),))
    same = [distance(logits(theirs, prompt), ours) for prompt, ours in zip(prompts, found, strict=True)]
    assert sum(d < 1e-5 for d in same) >= 15 and max(same) < 0.05, same
    assert case.rows is as_they_are or min(plain) > 1e-3, "the rows are rounded"
