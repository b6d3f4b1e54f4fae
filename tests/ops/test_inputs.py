"""Rows that a checkpoint orders and rounds by its own scheme: the definition, equal bits everywhere, refusals."""

import ml_dtypes
import numpy as np
import pytest

from kvasir.ops import native as door
from kvasir.ops.linear import native
from kvasir.ops.linear.packed import pack_rows
from kvasir.quant.gguf_types import GGMLType
from kvasir.quant.inputs import Inputs
from kvasir.weights.published.codes import to_own_blocks
from tests.isas import restore_isa  # noqa: F401 - a fixture of all tests here

from .products import ISAS, assert_only_the_row_counts
from .test_linear_int import draw, groups_of
from .test_native import bits
from .test_packed import raw_rows

pytestmark = pytest.mark.skipif(not door.available(), reason=f"native kernels: {door.reason()}")

E4M3 = ml_dtypes.float8_e4m3fn
STATIC = np.float32(0.017)


def matrix(name: str, cols: int, inputs: Inputs, segments: int = 1, rows: int = 37):
    return pack_rows(name, raw_rows(GGMLType[name], rows, cols, 5), rows, cols, segments, threads=1, inputs=inputs)


def rows_of(cols: int) -> np.ndarray:
    x = draw(1, 9, cols)
    x[1] *= 1e30
    x[2] *= 1e-42
    x[3] = 0
    x[4, ::3] = -x[4].max()  # -127.5 dynamic steps
    x[5] *= np.float32(1e-3)
    return x


@pytest.mark.parametrize("name", ["Q4_0", "INT4_ZP", "Q4_K"])
@pytest.mark.parametrize("segments", [1, 2])
def test_ordered_columns_are_those_of_ordered_rows(name, segments):
    cols = 512
    order = np.random.default_rng(segments).permutation(cols).astype(np.int32)
    plain = pack_rows(name, raw_rows(GGMLType[name], 37, cols, 5), 37, cols, segments, threads=1)
    ordered, x = matrix(name, cols, Inputs(order=order), segments), rows_of(cols)
    expected = bits(native.product(plain, np.ascontiguousarray(x[:, order])))
    assert np.array_equal(bits(native.product(ordered, x)), expected)
    x = draw(3, 9, cols, hostile=0.01)
    assert_only_the_row_counts(ordered, x, draw(4, 37), draw(5, 9, 37), 6)


@pytest.mark.parametrize("scale", [0.0, STATIC])
@pytest.mark.parametrize("segments", [1, 4])
def test_int8_rows(scale, segments):
    cols = 256
    packed, x = matrix("INT8", cols, Inputs("int8", float(scale)), segments), rows_of(cols)
    each = np.full((len(x), 1), scale) if scale else np.abs(x).max(1, keepdims=True) / np.float32(127.5)
    each = np.where(each < np.finfo(np.float32).tiny, 0, each)
    with np.errstate(all="ignore"):
        q = np.where(each > 0, np.rint(np.clip(x / each, -128, 127)), 0)
    assert (q == -128).any()
    for isa in ISAS:
        door.force_isa(isa)
        groups = groups_of(packed, x)
        assert np.array_equal(groups["q"].reshape(len(x), -1), q), isa
        assert (groups["scale"].reshape(len(x), -1) == each).all(), isa
    assert_only_the_row_counts(packed, draw(3, 9, cols, hostile=0.01), draw(4, 37), draw(5, 9, 37), 6)


def llm_int8(x: np.ndarray, weights: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """(codes, product) of rows by bitsandbytes' arithmetic for a row alone, in float64 from the codes on."""
    is_outlier = np.abs(x) >= (threshold or np.inf)
    others = np.where(is_outlier, np.float32(0), x)
    most = np.abs(others).max(1, keepdims=True)
    empty = most < 127 * np.finfo(np.float32).tiny
    with np.errstate(all="ignore"):
        codes = np.where(empty, 0, np.rint(others * (np.float32(127) / most)))
    exact = (codes * (most / np.float32(127))).astype(np.float64) @ weights.T
    return codes, exact + np.where(is_outlier, x, 0).astype(np.float64) @ weights.T


@pytest.mark.parametrize("threshold", [0.0, 2.0, 6.0])
@pytest.mark.parametrize("segments", [1, 4])
def test_outliers(threshold, segments):
    """Rows without outliers, with one, with some in each group, and of outliers alone."""
    cols = 512
    packed, x = matrix("INT8", cols, Inputs("outliers", threshold), segments), rows_of(cols)
    x[6, 77], x[7] = -threshold or -9, np.where(x[7] < 0, x[7] - 6, x[7] + 6)
    weights = np.stack([packed.row(i) for i in range(packed.rows)]).astype(np.float64)
    codes, expected = llm_int8(x, weights, threshold)
    for isa in ISAS:
        door.force_isa(isa)
        assert np.array_equal(groups_of(packed, x)["q"].reshape(len(x), -1), codes), isa
        found = native.product(packed, x)
        size = np.abs(x).astype(np.float64) @ np.abs(weights).T
        assert (np.abs(found - expected) <= 1e-6 * size + 1e-37).all(), isa
    assert (codes[6, 77] == 0) == bool(threshold) and (threshold != 6 or not codes[7].any())
    assert_only_the_row_counts(packed, draw(3, 9, cols, hostile=0.01), draw(4, 37), draw(5, 9, 37), 6)
    assert_only_the_row_counts(packed, x, draw(4, 37), draw(5, 9, 37), 6)


def test_outliers_are_those_of_the_package():
    """Of a row alone: for a batch, the package takes a column for an outlier of all rows if it is one of any."""
    torch = pytest.importorskip("torch")
    package = pytest.importorskip("bitsandbytes", reason="bitsandbytes is the oracle of this test")
    cols, rows = 512, 48
    random = np.random.default_rng(0)
    weight = random.standard_normal((rows, cols), np.float32)
    layer = package.nn.Linear8bitLt(cols, rows, bias=False, has_fp16_weights=False, threshold=6.0)
    layer.weight = package.nn.Int8Params(torch.from_numpy(weight).half(), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu").eval()
    x = random.standard_normal((5, cols), np.float32).astype(np.float16)
    x[1:, 7], x[2:, [8, 300]], x[3] = 6, -60, x[3] * 4
    with torch.no_grad():
        expected = np.concatenate([layer(torch.from_numpy(row[None].copy())).numpy() for row in x]).astype(np.float32)
    codes, scales = layer.state.CB.numpy(), layer.state.SCB.numpy().astype(np.float32)
    blocks = to_own_blocks("INT8", codes.view(np.uint8) ^ 128, d=scales[:, None] * np.float32(1 / 127))
    packed = pack_rows("INT8", blocks, rows, cols, 1, threads=1, inputs=Inputs("outliers", 6.0))
    theirs = package.functional.int8_vectorwise_quant(torch.from_numpy(x[1:2].copy()), threshold=6.0)[0].numpy()
    assert np.array_equal(groups_of(packed, x.astype(np.float32))["q"].reshape(len(x), -1)[1:2], theirs)
    found = native.product(packed, x.astype(np.float32))
    assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max(), "float16 of the package"


@pytest.mark.parametrize(("scale", "group"), [(0.0, 0), (0.0, 128), (STATIC, 0)])
@pytest.mark.parametrize("segments", [1, 2])
def test_fp8_rows(scale, group, segments):
    cols = 512
    packed, x = matrix("FP8", cols, Inputs("fp8", float(scale), group), segments), rows_of(cols)
    grouped = x.reshape(len(x), -1, group or cols)
    each = np.full((1, 1, 1), scale) if scale else np.abs(grouped).max(-1, keepdims=True) / np.float32(448)
    is_empty = each < np.finfo(np.float32).tiny
    with np.errstate(all="ignore"):
        codes = np.clip(grouped / each, -448, 448).astype(E4M3).astype(np.float32)
    expected = np.where(is_empty, 0, codes * each).reshape(x.shape).astype(np.float32)
    for isa in ISAS:
        door.force_isa(isa)
        found = native.prepare(packed, x).view(np.float32)[:, :cols]
        assert np.array_equal(found, expected), isa
    assert_only_the_row_counts(packed, draw(3, 9, cols, hostile=0.01), draw(4, 37), draw(5, 9, 37), 6)


def test_e4m3_rounds_to_the_nearest():
    """All numbers of E4M3, what lies between them, and what lies next to that."""
    numbers = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(end)).astype(np.float32) for end in (-1e3, 1e3)]
    values = np.resize(np.concatenate([numbers, middles, *beside, [1e3, -1e3]]).astype(np.float32), (2, 512))
    packed = matrix("FP8", 512, Inputs("fp8", 1.0))
    with np.errstate(all="ignore"):
        expected = np.clip(values, -448, 448).astype(E4M3).astype(np.float32)
    for isa in ISAS:
        door.force_isa(isa)
        assert np.array_equal(native.prepare(packed, values).view(np.float32)[:, :512], expected), isa


def test_a_number_that_is_not_finite_stays_one():
    rules = [("FP8", Inputs("fp8")), ("INT8", Inputs("int8", 0.1)), ("INT8", Inputs("outliers", 6.0))]
    for name, inputs in rules:
        packed = matrix(name, 128, inputs)
        for poison in (np.nan, np.inf):
            x = draw(1, 2, 128)
            x[1, 77] = poison
            for isa in ISAS:
                door.force_isa(isa)
                found = native.product(packed, x)
                assert np.isfinite(found[0]).all() and not np.isfinite(found[1]).any(), isa
                assert inputs.rounding == "outliers" or np.isnan(found[1]).all(), isa


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("FP8", Inputs("int8"), "FP8 are not rounded to int8"),
        ("Q4_0", Inputs("fp8"), "Q4_0 are not rounded"),
        ("Q4_0", Inputs("outliers", 6.0), "Q4_0 are not rounded"),
        ("INT8", Inputs("outliers", 6.0, order=np.arange(128, dtype=np.int32)), "cannot be ordered"),
        ("FP8", Inputs("fp8", group=40), "groups of 40"),
        ("INT8", Inputs("int8", -1.0), "scaled by -1"),
        ("INT8", Inputs("int8", float("nan")), "scaled by nan"),
        ("FP8", Inputs(order=np.arange(128, dtype=np.int32)), "not a permutation"),
        ("Q4_0", Inputs(order=np.zeros(128, np.int32)), "not a permutation of 128"),
        ("Q4_0", Inputs(order=np.arange(64, dtype=np.int32)), "not a permutation of 128"),
    ],
)
def test_rules_without_a_kernel_are_refused(name, inputs, message):
    with pytest.raises(ValueError, match=message):
        matrix(name, 128, inputs)
