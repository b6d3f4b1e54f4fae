"""Batches of matrix products in batches of one size, as a GPU computes them."""

import pytest

torch = pytest.importorskip("torch")

from kvasir.ops.products import BATCH, in_batches, products  # noqa: E402


@pytest.mark.parametrize("count", [0, 1, BATCH - 1, BATCH, 2 * BATCH + 3])
def test_each_product_is_there_whatever_the_count_and_the_strides(count):
    draw = torch.Generator().manual_seed(count)
    a = torch.randn(count, 16, 24, generator=draw)
    b = torch.randn(count, 8, 24, generator=draw).transpose(1, 2)
    wanted = a.double() @ b.double()
    for found in (in_batches(a, b), products(a, b)):
        assert found.shape == (count, 16, 8) and found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_library_sees_one_shape_and_contiguous_operands(monkeypatch):
    seen = set()
    real = torch.bmm

    def bmm(a, b, out):
        seen.add((tuple(a.shape), tuple(b.shape), a.is_contiguous(), b.is_contiguous()))
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "bmm", bmm)
    for count in (1, 5, BATCH, BATCH + 1):
        in_batches(torch.ones(count, 4, 8), torch.ones(count, 6, 8).transpose(1, 2))
    assert seen == {((BATCH, 4, 8), (BATCH, 8, 6), True, True)}
