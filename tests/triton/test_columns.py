"""Parts of rows, on the device."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch

from kvasir.ops.columns.triton import take_columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "last"), [(0, 5), (7, 1900)])
def test_some_columns_of_rows(dtype, first, last):
    """Also where a row takes several programs; rounded to nearest even."""
    x = torch.randn(5, 1901)
    out = torch.full((5, last - first), torch.nan, dtype=dtype)
    take_columns(x, first, out)
    assert torch.equal(out, x[:, first:last].to(dtype))
