"""Operations on several streams: the kernels against the torch bodies, with equal bits on every instruction set, alone
and with other rows."""

import ctypes

import pytest
import torch

from kvasir.ops import native
from kvasir.ops.streams import body

pytestmark = pytest.mark.skipif(bool(native.reason()), reason="needs the native library")
ISAS = [name for name in native.ISAS if native.lib().kvasir_set_isa(native.ISAS.index(name)) >= 0]
native.force_isa(None)
P, N, F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
STREAMS = 3


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cut(x, deviations=0.5):
    out = torch.empty_like(x)
    call = native.declare("kvasir_gaussian_cut", None, P, P, N, N, F)
    call(out.data_ptr(), x.data_ptr(), *x.shape, deviations)
    return out


def match(x, like, least=1e-5):
    out = torch.empty_like(x)
    call = native.declare("kvasir_match", None, P, P, P, N, N, F)
    call(out.data_ptr(), x.data_ptr(), like.data_ptr(), *x.shape, least)
    return out


def predict(x, coefs):
    out = torch.empty_like(x)
    call = native.declare("kvasir_predict_streams", None, P, P, P, N, N, N)
    call(out.data_ptr(), x.data_ptr(), coefs.data_ptr(), len(x), STREAMS, x.shape[1] // STREAMS)
    return out


def correct(x, computed, coefs):
    out = torch.empty_like(x)
    call = native.declare("kvasir_correct_streams", None, P, P, P, P, N, N, N, N)
    call(out.data_ptr(), *(t.data_ptr() for t in (x, computed, coefs)), len(x), STREAMS, computed.shape[1], 1)
    return out


WIDTHS = (1, 7, 16, 17, 100, 1023)
CASES = {
    "gaussian_cut": (cut, lambda x: body.gaussian_cut(x, 0.5), lambda w: (rows(5, w),)),
    "match": (match, lambda x, y: body.match_magnitude(x, y, 1e-5), lambda w: (rows(5, w), rows(5, w, seed=1))),
    "predict": (
        predict,
        lambda x, c: body.predict_streams(x, c, STREAMS),
        lambda w: (rows(5, STREAMS * w), rows(5, STREAMS * STREAMS, seed=1)),
    ),
    "correct": (
        correct,
        lambda x, y, c: body.correct_streams(x, y, c, STREAMS, 1),
        lambda w: (rows(5, STREAMS * w), rows(5, w, seed=1), rows(5, STREAMS, seed=2)),
    ),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_their_bodies(name, width):
    kernel, plain, make = CASES[name]
    args = make(width)
    torch.testing.assert_close(kernel(*args), plain(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [0.0, torch.nan, torch.inf, 3e38, 1e-42])
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_on_every_instruction_set_and_alone(name, poison):
    kernel, _, make = CASES[name]
    args = make(50)
    args[0][2, 13] = poison
    found = []
    for isa in ISAS:
        native.force_isa(isa)
        found.append(kernel(*args))
        alone = torch.cat([kernel(*(a[i : i + 1].clone() for a in args)) for i in range(5)])
        assert torch.equal(alone.nan_to_num(7.0), found[-1].nan_to_num(7.0))
    native.force_isa(None)
    assert all(torch.equal(f.nan_to_num(7.0), found[0].nan_to_num(7.0)) for f in found)


def test_values_by_hand():
    x = torch.tensor([[0.0, 2.0, 4.0, 6.0]])  # mean 3, deviation sqrt(5)
    assert cut(x, 0.0).tolist() == [[0.0, 0.0, 1.0, 3.0]]
    assert match(torch.tensor([[3.0, 4.0]]), torch.tensor([[6.0, 8.0]])).tolist() == [[6.0, 8.0]]
    assert match(torch.zeros(1, 2), torch.ones(1, 2)).tolist() == [[0.0, 0.0]]
    streams, coefs = torch.tensor([[1.0, 10.0, 100.0]]), torch.tensor([[0.0, 1, 0, 0, 0, 2, 1, 0, 0]])
    assert predict(streams, coefs).tolist() == [[11.0, 210.0, 101.0]]
    assert correct(streams, torch.tensor([[12.0]]), torch.tensor([[0.0, 1.0, -1.0]])).tolist() == [[3.0, 14.0, 100.0]]
