"""The quantizers of the tests write what both decoders read alike, and what is near the weights."""

import gguf
import numpy as np
import pytest

from kvasir.quant.gguf_types import GGMLType, dequantize
from tests.quant.kquants import quantize

# rms of the rounding of weights of deviation 1, just above what was measured. MXFP4 has powers of two as scales; three
# levels, and two, have to do without most of the weight.
BOUNDS = {
    "Q8_0": 0.0055, "Q5_0": 0.044, "Q5_1": 0.039, "Q4_0": 0.088, "Q4_1": 0.08, "IQ4_NL": 0.082, "MXFP4": 0.12,
    "Q2_K": 0.34, "Q3_K": 0.16, "Q4_K": 0.08, "Q5_K": 0.039, "Q6_K": 0.0195, "IQ4_XS": 0.082,
    "TQ1_0": 0.83, "TQ2_0": 0.83, "Q1_0": 0.61,
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_rounding_stays_within_its_bound(name):
    values = np.random.default_rng(0).standard_normal((64, 768)).astype(np.float32)
    raw = quantize(values, name)
    assert raw.shape == (64, GGMLType[name].row_bytes(768)) and raw.dtype == np.uint8
    ours = dequantize(raw, GGMLType[name], values.shape)
    if name != "Q1_0":  # which the package does not decode
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    assert np.sqrt(np.square(ours - values).mean()) < BOUNDS[name]


@pytest.mark.parametrize("name", BOUNDS)
def test_zeros_stay_zeros_beside_others(name):
    values = np.random.default_rng(0).standard_normal((2, 512)).astype(np.float32)
    values[0] = 0.0
    assert np.array_equal(dequantize(quantize(values, name), GGMLType[name], values.shape)[0], values[0])
