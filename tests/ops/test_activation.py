import pytest
import torch
import torch.nn.functional as F

from kvasir.ops.activation import ACTIVATIONS, softcap

REFERENCES = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
X = torch.randn(4099, generator=torch.Generator().manual_seed(0)) * 4


@pytest.mark.parametrize("name", REFERENCES)
def test_against_torch(name):
    torch.testing.assert_close(ACTIVATIONS[name](X), REFERENCES[name](X), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("cap", (1.0, 30.0))
def test_softcap_is_a_scaled_tanh(cap):
    x = X * cap
    torch.testing.assert_close(softcap(x, cap), (x.double() / cap).tanh().float() * cap, rtol=2e-6, atol=2e-6)
    assert softcap(x, cap).abs().max() <= cap
    assert softcap(torch.tensor([torch.nan]), cap).isnan().all()


@pytest.mark.parametrize("name", [*ACTIVATIONS, "softcap"])
def test_an_element_does_not_depend_on_its_position(name):
    act = ACTIVATIONS.get(name, lambda x: softcap(x, 3.0))
    whole = act(X)
    for start, count in ((0, 1), (1, 3), (5, 17), (17, 31), (33, 64), (100, 1000)):
        assert torch.equal(act(X[start : start + count].clone()), whole[start : start + count])
    square = X[:4096].view(64, 64)
    assert torch.equal(act(square.T).T, whole[:4096].view(64, 64))


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "relu2"])
def test_activations_of_large_values_are_their_limits(name):
    far = ACTIVATIONS[name](torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4, torch.nan]))
    assert torch.equal(far[2:5], torch.tensor([0.0, 100.0, 1e4]))
    assert far[:2].abs().max() < 1e-30
    assert far[5].isnan()
