import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.ops.linear import TILE, linear
from tests.examples import examples

SHAPES = ((8, 64), (77, 96), (172, 64), (64, 172), (40, 22), (64, 1040), (300, 512))
# max error over max value: float32 sums of about 1000 products; bfloat16 inputs round at 2^-9, and so does the result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def sample(outputs: int, inputs: int, segments: int = 1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    x = torch.randn(TILE, inputs, generator=generator)
    parts = weight.to(dtype).view(outputs, segments, -1).transpose(0, 1).contiguous()
    return x, weight, parts, torch.randn(outputs, generator=generator)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("segments", (1, 2, 4))
@pytest.mark.parametrize(("outputs", "inputs"), [s for s in SHAPES if s[1] % 4 == 0])
def test_against_float64(outputs, inputs, segments, dtype):
    x, weight, parts, bias = sample(outputs, inputs, segments, dtype)
    found = linear(x, parts, bias)
    exact = x.double() @ weight.double().T + bias
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < TOLERANCE[dtype] * exact.abs().max()


def test_zeros_after_a_segment_change_nothing():
    x, _, parts, bias = sample(24, 44, segments=2)
    padded = torch.nn.functional.pad(parts, (0, 10))
    torch.testing.assert_close(linear(x, padded, bias), linear(x, parts, bias), rtol=1e-6, atol=1e-6)


def test_segments_join_by_a_balanced_tree():
    """Each segment is one product; the four are added two and two."""
    values = torch.tensor([1e8, -1e8, 1.0, 1.0])
    weight = values.view(4, 1, 1)
    found = linear(torch.ones(TILE, 4), weight)
    assert torch.equal(found, torch.full((TILE, 1), 2.0))


@pytest.mark.usefixtures("exact_linear")
@examples(40)
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(list(TOLERANCE)),
    place=st.integers(0, 2 * TILE - 1),
    threads=st.sampled_from([1, 2, 4]),
    company=st.sampled_from([0.0, 1.0, torch.nan, torch.inf]),
)
def test_a_row_depends_on_itself_alone(shape, dtype, place, threads, company):
    outputs, inputs = shape
    x, weight, _, _ = sample(outputs, inputs)
    missing = -inputs % 32 if dtype != torch.float32 else 0
    parts = torch.nn.functional.pad(weight, (0, missing)).to(dtype)[None]
    threads = 1 if dtype == torch.float32 else threads  # as eager has it
    torch.set_num_threads(1)
    alone = linear(torch.cat([x[:1], torch.zeros(TILE - 1, inputs)]), parts)[0]
    torch.set_num_threads(threads)
    crowd = torch.full((2 * TILE, inputs), company)
    crowd[place] = x[0]
    assert torch.equal(linear(crowd, parts)[place], alone)
