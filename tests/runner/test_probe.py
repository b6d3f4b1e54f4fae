"""The probe changes when a library adds in another order, and with nothing else."""

import pytest
import torch

from kvasir.runner import probe as module
from kvasir.runner.probe import probe


def test_the_digest_is_repeatable():
    first = probe("cpu")
    torch.manual_seed(1)
    assert probe("cpu") == first and len(bytes.fromhex(first)) == 32


@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
def test_another_order_of_additions_in_one_dtype_is_seen(monkeypatch, dtype):
    usual, linear = probe("cpu"), module.F.linear

    def in_halves(x, weight):
        if x.dtype != dtype:
            return linear(x, weight)
        half = x.shape[1] // 2
        return linear(x[:, half:], weight[:, half:]) + linear(x[:, :half], weight[:, :half])

    monkeypatch.setattr(module.F, "linear", in_halves)
    assert probe("cpu") != usual


@pytest.mark.parametrize("name", ["silu", "gelu", "layer_norm"])
def test_a_function_that_rounds_otherwise_is_seen(monkeypatch, name):
    usual, function = probe("cpu"), getattr(module.F, name)

    def rounded(x, *args, **options):
        return torch.nextafter(function(x, *args, **options).float(), torch.tensor(9.0)).to(x.dtype)

    monkeypatch.setattr(module.F, name, rounded)
    assert probe("cpu") != usual


def test_products_cancel_except_for_rounding():
    """So the bits show the order of additions."""
    outputs = {}
    linear = module.F.linear

    def noted(x, weight):
        outputs[x.dtype, x.shape[1]] = linear(x.double(), weight.double()), x.double().abs() @ weight.double().abs().T
        return linear(x, weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.F, "linear", noted)
        probe("cpu")
    assert {width for _, width in outputs} == {*module.WIDTHS} and {d for d, _ in outputs} == {*module.DTYPES}
    assert all((exact.abs() <= 1e-12 * size).all() for exact, size in outputs.values())
