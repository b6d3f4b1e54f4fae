"""The native row kernels against their torch bodies, and the same bits on every instruction set and in every place."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvasir.ops import native
from kvasir.ops.activation import clamp, gelu, gelu_tanh, relu, silu, softcap, xielu
from kvasir.ops.norm import layer_norm
from kvasir.ops.rope import rope
from tests.isas import isas, restore_isa  # noqa: F401 - a fixture of all tests here

from .test_native import bits

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")

FUNCTIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "exp": 5}  # csrc/rows.h
BODIES = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "exp": torch.exp}
WIDTHS = (1, 7, 8, 15, 16, 17, 31, 33, 100, 128, 1023, 1536)
# float32 against the body: each has its own exp, tanh and erf, off by up to 1.5 units in the last place (1.2e-7), and
# some roundings after it. Where 1 + erf(x) cancels, that unit is one of 1, times |x| <= 12: hence the absolute part.
CLOSE = {"rtol": 1e-6, "atol": 2e-6}
# Norms: two sums of up to 1536 terms in another order than the body's, some 20 roundings of 6e-8 of values up to 10.
CLOSE_SUMS = {"rtol": 2e-6, "atol": 1e-5}

FLOATS = ctypes.c_void_p
COUNT = ctypes.c_int64
ODD = np.array([0.0, -0.0, 1e-42, -1e-38, 3e38, -3e38, np.inf, -np.inf, np.nan, 1.0, -90.0, 88.7], np.float32)


def call(name: str, *arguments: np.ndarray | int | float) -> None:
    """Arrays are dense float32; they stay referenced until the call is over."""
    kinds = {np.ndarray: FLOATS, int: COUNT, float: ctypes.c_float}
    types = [
        ctypes.c_int32 if name in ("activate", "gated") and i == 0 else kinds[type(a)] for i, a in enumerate(arguments)
    ]
    plain = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
    assert all(a.dtype == np.float32 and a.flags.c_contiguous for a in arguments if isinstance(a, np.ndarray))
    native.declare(f"kvasir_{name}", None, *types)(*plain)


def run_layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    out = np.full_like(x, 7)
    call("layer_norm", out, x, weight, bias, x.shape[0], x.shape[1], eps)
    return out


def run_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    out = np.full_like(x, 7)
    call("rope", out, x, cos, sin, *x.shape, cos.shape[1])
    return out


def run_activate(function: str, x: np.ndarray) -> np.ndarray:
    out = np.full_like(x, 7)
    call("activate", FUNCTIONS[function], out, x, x.size)
    return out


def run_gated(function: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    out = np.full_like(gate, 7)
    call("gated", FUNCTIONS[function], out, gate, up, gate.size)
    return out


def run_softcap(x: np.ndarray, cap: float) -> np.ndarray:
    out = np.full_like(x, 7)
    call("softcap", out, x, cap, x.size)
    return out


XIELU = (0.8, 1.2, 0.5, -1e-6)


def run_clamp(x: np.ndarray, low: float = -0.5, high: float = 0.25) -> np.ndarray:
    out = np.full_like(x, 7)
    call("clamp", out, x, low, high, x.size)
    return out


def run_xielu(x: np.ndarray) -> np.ndarray:
    out = np.full_like(x, 7)
    call("xielu", out, x, np.array(XIELU, np.float32), x.size)
    return out


ELEMENTWISE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **{name: lambda x, name=name: run_activate(name, x) for name in FUNCTIONS},
    **{f"gated {name}": lambda x, name=name: run_gated(name, x, x) for name in FUNCTIONS},
    "softcap": lambda x: run_softcap(x, 30.0),
    "clamp": run_clamp,
    "xielu": run_xielu,
}


def sample(*shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(shape).normal(0, scale, shape).astype(np.float32)


def on_all_isas(compute: Callable[[], np.ndarray]) -> np.ndarray:
    """What `compute` gives, after comparing its bits on all instruction sets."""
    results = []
    for name in isas():
        native.force_isa(name)
        results.append(compute())
        assert np.array_equal(bits(results[-1]), bits(results[0])), name
    return results[0]


def units_off(found: np.ndarray, exact: np.ndarray) -> float:
    """The greatest distance in units of the last place of a float32."""
    return float((np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width):
    x, weight, bias = sample(5, width, scale=3) + 1, sample(width), sample(width)
    found = on_all_isas(lambda: run_layer_norm(x, weight, bias))
    tensor = torch.from_numpy
    body = layer_norm.body(tensor(x), tensor(weight), tensor(bias), 1e-5)
    torch.testing.assert_close(tensor(found), body, **CLOSE_SUMS)


def test_a_norm_does_not_see_its_neighbours():
    x, weight, bias = sample(6, 77), sample(77), sample(77)
    together = run_layer_norm(x, weight, bias)
    x[[0, 2, 5]] = np.nan
    beside_nan = run_layer_norm(x, weight, bias)
    for row in (1, 3, 4):
        alone = run_layer_norm(x[row : row + 1].copy(), weight, bias)[0]
        assert np.array_equal(bits(alone), bits(together[row]))
        assert np.array_equal(bits(alone), bits(beside_nan[row]))


@pytest.mark.parametrize(("head_dim", "half"), [(2, 1), (8, 4), (64, 32), (128, 64), (80, 16), (21, 5), (100, 50)])
def test_rope_has_the_bits_of_its_body(head_dim, half):
    """Both round each product and each sum: no fused multiply-add in either."""
    x, angles = sample(4, 3, head_dim), sample(4, half, scale=100)
    cos, sin = np.cos(angles), np.sin(angles)
    found = on_all_isas(lambda: run_rope(x, cos, sin))
    body = rope.body(*map(torch.from_numpy, (x, cos, sin))).numpy()
    assert np.array_equal(bits(found), bits(body))
    in_place = x.copy()
    call("rope", in_place, in_place, cos, sin, *x.shape, half)
    assert np.array_equal(bits(in_place), bits(found))
    alone = run_rope(x[2:3].copy(), cos[2:3].copy(), sin[2:3].copy())
    assert np.array_equal(bits(alone[0]), bits(found[2]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_native_activations_agree_with_torch(name):
    x, up = np.linspace(-12, 12, 4099).astype(np.float32), sample(4099)
    found = on_all_isas(lambda: run_activate(name, x))
    body = BODIES[name](torch.from_numpy(x))
    torch.testing.assert_close(torch.from_numpy(found), body, **CLOSE)
    gated = on_all_isas(lambda: run_gated(name, x, up))
    assert np.array_equal(bits(gated), bits(found * up))


def test_native_clamp_and_xielu_agree_with_torch():
    x = np.concatenate([np.linspace(-20, 20, 4001, dtype=np.float32), ODD])
    found = on_all_isas(lambda: run_clamp(x))
    torch.testing.assert_close(  # but for denormal numbers
        torch.from_numpy(found), clamp.body(torch.from_numpy(x), -0.5, 0.25), rtol=0, atol=1e-37, equal_nan=True
    )
    finite = np.linspace(-20, 20, 4001, dtype=np.float32)
    found = on_all_isas(lambda: run_xielu(finite))
    torch.testing.assert_close(torch.from_numpy(found), xielu.body(torch.from_numpy(finite), *XIELU), **CLOSE)


@pytest.mark.parametrize("cap", (1.0, 30.0, 50.0))
def test_native_softcap_agrees_with_torch(cap):
    x = np.linspace(-20 * cap, 20 * cap, 4099).astype(np.float32)
    found = on_all_isas(lambda: run_softcap(x, cap))
    torch.testing.assert_close(torch.from_numpy(found), softcap.body(torch.from_numpy(x), cap), **CLOSE)
    assert (np.abs(found) <= cap).all()


def test_the_functions_are_accurate():
    """exp, tanh (a softcap at 1) and erf (in gelu, where nothing cancels) against float64."""
    x = np.concatenate([np.linspace(-80, 80, 100_001), np.geomspace(1e-37, 1, 10_001)]).astype(np.float32)
    wide = x.astype(np.float64)
    assert units_off(run_activate("exp", x), np.exp(wide)) < 1.5
    assert units_off(run_softcap(x, 1.0), np.tanh(wide)) < 1.5
    x = np.concatenate([np.linspace(0.01, 8, 100_001), np.geomspace(1e-30, 1, 10_001)]).astype(np.float32)
    exact = torch.nn.functional.gelu(torch.from_numpy(x).double()).numpy()
    assert units_off(run_activate("gelu", x), exact) < 3  # erf, the sum and two products


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_element_does_not_depend_on_its_position(name):
    act = ELEMENTWISE[name]
    x = np.concatenate([sample(300, scale=4), ODD, sample(88)])
    whole = on_all_isas(lambda: act(x))
    for start, count in ((0, 1), (1, 3), (5, 16), (5, 17), (17, 31), (33, 64), (299, 14), (100, 300)):
        assert np.array_equal(bits(act(x[start : start + count].copy())), bits(whole[start : start + count]))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_kernels_write_in_place_and_nothing_else(name):
    memory = np.full(37 + 32, 5, np.float32)
    x = memory[16:-16]
    x[:] = sample(37)
    expected = ELEMENTWISE[name](x.copy())
    if name == "softcap":
        call("softcap", x, x, 30.0, 37)
    elif name == "clamp":
        call("clamp", x, x, -0.5, 0.25, 37)
    elif name == "xielu":
        call("xielu", x, x, np.array(XIELU, np.float32), 37)
    elif name.startswith("gated "):
        call("gated", FUNCTIONS[name.removeprefix("gated ")], x, x, x, 37)
    else:
        call("activate", FUNCTIONS[name], x, x, 37)
    assert np.array_equal(bits(x), bits(expected))
    assert (memory[:16] == 5).all() and (memory[-16:] == 5).all()


def test_activations_of_large_values_are_their_limits():
    far = np.array([-1e30, -1e4, -100.0, -0.0, 0.0, 100.0, 1e30, np.inf, np.nan], np.float32)
    for name in ("silu", "gelu", "gelu_tanh", "relu"):
        found = run_activate(name, far)
        assert (found[:5] == 0).all() and np.isnan(found[8]), name
        assert np.array_equal(found[5:8], far[5:8]), name
    assert np.array_equal(run_softcap(far, 2.0)[:8], [-2, -2, -2, 0, 0, 2, 2, 2])
    assert np.signbit(run_softcap(far, 2.0)[3])
    exp = run_activate("exp", np.array([-np.inf, -104, -87.4, 0, 88.8, np.inf, np.nan], np.float32))
    assert np.array_equal(exp[:6], [0, 0, 0, 1, np.inf, np.inf]) and np.isnan(exp[6])


def test_zero_elements_are_accepted():
    empty = np.zeros(0, np.float32)
    assert run_activate("silu", empty).size == 0
    assert run_layer_norm(np.zeros((0, 8), np.float32), sample(8), sample(8)).shape == (0, 8)
