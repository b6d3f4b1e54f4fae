import pytest
import torch

from kvasir.layers.softcap import SoftCap

X = torch.linspace(-400, 400, 801)


@pytest.mark.parametrize("cap", [5.0, 30.0])
def test_values_stay_within_the_cap_and_in_order(cap):
    y = SoftCap(cap)(X)
    torch.testing.assert_close(y, cap * torch.tanh(X / cap), rtol=1e-5, atol=1e-5)
    assert y.abs().max() <= cap and (y.diff() >= 0).all()


def test_small_values_are_hardly_changed():
    x = torch.linspace(-0.01, 0.01, 21)
    torch.testing.assert_close(SoftCap(30.0)(x), x, rtol=1e-5, atol=1e-7)


def test_a_cap_of_0_changes_nothing():
    assert SoftCap(0.0)(X) is X
