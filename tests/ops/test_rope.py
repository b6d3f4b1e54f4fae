import torch

from kvasir.ops.rope import rope


def test_dimension_i_turns_with_i_plus_half():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, 8, generator=generator)
    angles = torch.rand(6, 4, generator=generator) * 100
    turned = rope(x, angles.cos(), angles.sin())
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(6, 4), angles)[:, None]
    expected = torch.cat([as_complex.real, as_complex.imag], dim=-1)
    torch.testing.assert_close(turned, expected, rtol=1e-5, atol=1e-5)


def test_dimensions_after_the_rotated_ones_are_unchanged():
    x = torch.randn(2, 1, 10)
    turned = rope(x, torch.zeros(2, 2), torch.ones(2, 2))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :2], -x[..., 2:4])
    assert torch.equal(turned[..., 2:4], x[..., :2])
