"""Encoding GGUF tensors: the bytes of the `gguf` package."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvasir.errors import UnsupportedModel
from kvasir.quant.gguf_quantize import quantize
from kvasir.quant.gguf_types import CHUNK, GGMLType, dequantize

WIDTHS = [GGMLType.F32, GGMLType.F16, GGMLType.BF16]
BLOCKS = [GGMLType.Q4_0, GGMLType.Q8_0]

anything = st.floats(width=32)
# Far enough from overflow that a block's inverse scale is finite; integers and halves make for ties.
ordinary = st.one_of(
    st.just(0.0),
    st.integers(-300, 300).map(lambda n: n / 2),
    st.floats(2**-100, 2**100, width=32),
    st.floats(-(2**100), -(2**-100), width=32),
)


def theirs(values: np.ndarray, ggml_type: GGMLType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(gguf.quantize(values, gguf.GGMLQuantizationType(ggml_type))).view(np.uint8)


@pytest.mark.parametrize("ggml_type", WIDTHS, ids=lambda kind: kind.name)
@given(values=arrays(np.float32, (2, 32), elements=anything))
def test_plain_numbers_are_rounded_as_in_the_gguf_package(ggml_type, values):
    assert quantize(values, ggml_type).tolist() == theirs(values, ggml_type).tolist()


@pytest.mark.parametrize("ggml_type", BLOCKS, ids=lambda kind: kind.name)
@given(values=arrays(np.float32, (2, 64), elements=ordinary))
def test_blocks_are_those_of_the_gguf_package(ggml_type, values):
    assert quantize(values, ggml_type).tolist() == theirs(values, ggml_type).tolist()


@pytest.mark.parametrize(("ggml_type", "error"), [(GGMLType.Q8_0, 0.5 / 127), (GGMLType.Q4_0, 0.5 / 8)])
def test_the_error_is_half_a_step(ggml_type, error):
    values = np.random.default_rng(0).uniform(-1, 1, (CHUNK // 64 + 3, 96)).astype(np.float32)
    back = dequantize(quantize(values, ggml_type), ggml_type, values.shape)
    # Q4_0 has no level for the largest magnitude with the other sign: a whole step there; float16 scales
    # add 2^-11.
    step = 2 if ggml_type is GGMLType.Q4_0 else 1
    assert np.abs(back - values).max() <= step * error + 2**-11


def test_other_types_and_odd_rows_are_refused():
    with pytest.raises(UnsupportedModel, match="Q4_K"):
        quantize(np.zeros((1, 256), np.float32), GGMLType.Q4_K)
    with pytest.raises(ValueError, match="blocks"):
        quantize(np.zeros((1, 33), np.float32), GGMLType.Q8_0)
