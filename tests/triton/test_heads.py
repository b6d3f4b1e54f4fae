"""Rows that are divided into heads, on the device."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch

from kvasir.ops.heads.triton import join_heads


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dimensions_of_both_lie_side_by_side(heads, dtype):
    """Also where a row takes several programs."""
    a, b = torch.randn(5, heads, 500), torch.randn(5, heads, 601)
    out = torch.full((5, heads, 1101), torch.nan, dtype=dtype)
    join_heads(a, b, out)
    assert torch.equal(out, torch.cat([a, b], -1).to(dtype))
