"""NVFP4 of a GGUF file with the scales that llama.cpp's converter writes beside it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvasir.errors import ModelFileError
from kvasir.quant.gguf_types import GGMLType, dequantize
from kvasir.weights.gguf_scales import ScaledGGUF
from kvasir.weights.source import GGUFSource
from tests.weights.published import encode

gguf = pytest.importorskip("gguf", reason="gguf is the oracle of these tests")
NVFP4 = gguf.GGMLQuantizationType.NVFP4


def blocks_of(w: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """(rows of NVFP4, the scale of them all), from ModelOpt's tensors as the converter makes them."""
    made = encode.nvfp4(w)
    codes = np.stack((made["weight"] & 15, made["weight"] >> 4), axis=-1).reshape(len(w), -1, 2, 8)
    qs = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(len(w), -1, 32)
    scales = made["weight_scale"].view(np.uint8).reshape(len(w), -1, 4)
    return np.concatenate((scales, qs), axis=-1).reshape(len(w), -1), np.float32(made["weight_scale_2"])


class Writer(gguf.GGUFWriter):
    """Writes matrices of layers, and stacks of them, as NVFP4 with their scales."""

    def add_tensor(self, name, tensor, *arguments, **more):
        """As gguf-py's."""
        if not re.fullmatch(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down)(_exps)?)\.weight", name):
            return super().add_tensor(name, tensor, *arguments, **more)
        raw, scales = zip(*map(blocks_of, tensor.reshape(-1, *tensor.shape[-2:])), strict=True)
        stack = np.stack(raw) if tensor.ndim == 3 else raw[0]
        super().add_tensor(name, stack, raw_dtype=NVFP4)
        super().add_tensor(name.replace(".weight", ".scale"), np.array(scales, np.float32))
        super().add_tensor(name.replace(".weight", ".input_scale"), np.ones(len(scales), np.float32))


def written(path: Path, **tensors: np.ndarray) -> ScaledGGUF:
    writer = gguf.GGUFWriter(path, "llama")
    for name, array in tensors.items():
        writer.add_tensor(name.replace("__", "."), array, raw_dtype=NVFP4 if array.dtype == np.uint8 else None)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return ScaledGGUF(GGUFSource(path))


STACK = np.random.default_rng(0).standard_normal((3, 10, 128), np.float32)
RAW = np.stack([blocks_of(w)[0] for w in STACK])
SCALES = np.array([0.5, 1e-4, 3], np.float32)


def test_scales_multiply_their_matrices(tmp_path):
    source = written(
        tmp_path / "m.gguf", a__weight=RAW, a__scale=SCALES, b__weight=RAW[0], b__scale=SCALES[1:2],
        b__input_scale=SCALES[:1], c__weight=RAW[1], n__scale=SCALES,
    )  # fmt: skip
    assert list(source.names()) == ["a.weight", "b.weight", "c.weight", "n.scale"]
    values = gguf.dequantize(RAW, NVFP4).reshape(STACK.shape)
    expected = {"a": values * SCALES[:, None, None], "b": values[0] * SCALES[1], "c": values[1]}
    for name, array in expected.items():
        kind = "NVFP4" if name == "c" else "NVFP4_SCALED"
        info = source.info(f"{name}.weight")
        assert info.dtype == kind and info.shape == array.shape
        assert np.allclose(source.array(f"{name}.weight"), array, rtol=3e-7, atol=0)
        found = dequantize(source.raw(f"{name}.weight"), GGMLType[kind], array.shape)
        assert np.array_equal(found, source.array(f"{name}.weight"))
    for index in (2, 0, 1):
        assert np.array_equal(source.array("a.weight", index), source.array("a.weight")[index])
    source.drop("a.weight")


@pytest.mark.parametrize("scales", [SCALES[:2], SCALES.astype(np.float16), np.array([1, np.nan, 1], np.float32)])
def test_scales_that_do_not_fit_are_refused(tmp_path, scales):
    with pytest.raises(ModelFileError, match=r"a\.scale .*expected 3 finite numbers"):
        written(tmp_path / "m.gguf", a__weight=RAW, a__scale=scales).raw("a.weight")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3-moe", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_file_is_the_folder_that_it_was_made_from(name, tmp_path, monkeypatch):
    """ModelOpt's folder and the file have the same matrices. The folder's rounding to bfloat16 is its package's, so
    what kernels get is compared."""
    transformers = pytest.importorskip("transformers")
    from kvasir.runner.load import open_checkpoint
    from kvasir.weights.find import find_model
    from tests.models import test_gguf_models as models
    from tests.models.hf import randomized
    from tests.models.oracle import state_of

    config = type(models.MODELS[name])(**{
        **models.MODELS[name].to_dict(), "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128,
        "head_dim": 32,
    })  # fmt: skip
    hf = randomized(transformers.AutoModelForCausalLM.from_config(config))
    tensors = {tensor: t.float().numpy() for tensor, t in state_of(hf).items()}
    folder = encode.write(tmp_path, {**hf.config.to_dict(), "architectures": [type(hf).__name__]}, tensors, "nvfp4")
    monkeypatch.setattr(gguf, "GGUFWriter", Writer)
    file = models.write_gguf(hf, tmp_path / "model.gguf")
    _, theirs = open_checkpoint(find_model(str(folder)))
    _, ours = open_checkpoint(find_model(str(file)))
    seen = 0
    for tensor in ours.names():
        if ours.info(tensor).dtype == "NVFP4_SCALED":
            assert np.array_equal(ours.raw(tensor), theirs.raw(tensor)), tensor
            seen += 1
    assert seen == 2 * (4 + 3 * (4 if name == "qwen3-moe" else 1))
