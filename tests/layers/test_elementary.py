"""Our own functions against the true values, by decimal arithmetic that shares nothing with them."""

import hashlib
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.layers.elementary import MAX_ANGLE, log, power, sin_cos
from kvasir.layers.rope import Rope, RopeScaling

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")
ANGLES = st.floats(-MAX_ANGLE, MAX_ANGLE, exclude_min=True, exclude_max=True)


def true_sin(angle: float, quarters: int = 0) -> Decimal:
    """sin(angle + quarters * pi / 2): Taylor's series after whole turns are taken off, with 90 digits."""
    with localcontext() as context:
        context.prec = 90
        x = Decimal(angle) + quarters * PI / 2
        x = x - 2 * PI * (x / (2 * PI)).to_integral_value()
        term = total = x
        i = 1
        while abs(term) > Decimal("1e-70"):
            term *= -x * x / ((i + 1) * (i + 2))
            i += 2
            total += term
        return total


def true_cos(angle: float) -> Decimal:
    return true_sin(angle, 1)


def close(found: float, true: Decimal) -> bool:
    """To 2e-16, and near zero to 4e-16 of the value."""
    return abs(Decimal(float(found)) - true) <= min(Decimal("2.3e-16"), abs(true) * Decimal("4e-16"))


def ulps(found: np.float32, true: Decimal) -> float:
    return float(abs(Decimal(float(found)) - true) / Decimal(float(np.spacing(np.float32(abs(true))))))


@given(st.one_of(ANGLES, st.floats(-4, 4), st.integers(0, 2**20).map(float)))
def test_sin_and_cos(x):
    sin, cos = sin_cos(np.array([x]))
    true = true_sin(x), true_cos(x)
    assert close(sin[0], true[0]) and close(cos[0], true[1])
    assert ulps(np.float32(sin[0]), true[0]) <= 0.5001 and ulps(np.float32(cos[0]), true[1]) <= 0.5001


@given(st.integers(1, int(MAX_ANGLE / math.pi * 2) - 1))
def test_sin_and_cos_near_multiples_of_half_pi(n):
    """Where the reduced angle is tiny: next to a multiple of pi / 2, on both sides."""
    near = float(Decimal(n) * PI / 2)
    for x in (near, math.nextafter(near, 0.0), math.nextafter(near, math.inf)):
        sin, cos = sin_cos(np.array([x]))
        assert close(sin[0], true_sin(x)) and close(cos[0], true_cos(x))


@given(st.integers(0, 2**20), st.sampled_from([1e4, 5e5, 1e6, 1e7]), st.sampled_from([32, 64, 96, 128]), st.data())
def test_rows_of_the_table(position, theta, dim, data):
    """The product of position and frequency is one rounding; from there to float32 less than one ulp is lost."""
    i = data.draw(st.integers(0, dim // 2 - 1))
    frequency = float(Decimal(theta) ** (Decimal(-2 * i) / dim))
    angle = position * frequency
    sin, cos = sin_cos(np.array([angle]))
    assert ulps(np.float32(sin[0]), true_sin(angle)) <= 0.5001
    assert ulps(np.float32(cos[0]), true_cos(angle)) <= 0.5001
    assert power(theta, -2 * i, dim) == frequency


def test_an_array_keeps_its_shape_and_its_elements_their_bits():
    x = np.linspace(-1e6, 1e6, 30_003).reshape(3, -1)
    sin, cos = sin_cos(x)
    assert sin.shape == cos.shape == x.shape
    for i, j in ((0, 0), (1, 5000), (2, 10_000)):
        alone = sin_cos(x[i : i + 1, j])
        assert (sin[i, j], cos[i, j]) == (alone[0][0], alone[1][0])
    strided = sin_cos(x.T)
    np.testing.assert_array_equal(strided[0], sin.T)
    np.testing.assert_array_equal(strided[1], cos.T)
    assert sin_cos(np.zeros((0, 4)))[0].shape == (0, 4)


@pytest.mark.parametrize("x", (MAX_ANGLE, -MAX_ANGLE, math.inf, math.nan))
def test_angles_beyond_are_refused(x):
    with pytest.raises(ValueError, match=f"{MAX_ANGLE:.0f}"):
        sin_cos(np.array([0.0, x]))


@given(st.floats(1.0, 1e12), st.integers(0, 256))
def test_a_power_is_the_rounded_root(base, i):
    """power(b, -i, 512)^512 * b^i is 1 to the last bits of the factors."""
    root = Fraction(power(base, -i, 512))
    with localcontext() as context:
        context.prec = 60
        product = (Decimal(root.numerator) / Decimal(root.denominator)) ** 512 * Decimal(base) ** i
    assert abs(product - 1) < Decimal(512) * Decimal(2) ** -53 * Decimal("1.01")


@given(st.floats(1e-6, 1e12))
def test_log_agrees_with_the_math_library(x):
    assert log(x) == pytest.approx(math.log(x), rel=3e-16, abs=0.0)


def test_bits_of_a_table():
    """They are the same on every machine; a change of them changes every answer of every model with such a table."""
    rope = Rope(128, 500000.0, RopeScaling("yarn", 4.0, 32768, attention_factor=1.1386294361119891))
    digest = hashlib.sha256(b"".join(part.astype("<f4").tobytes() for part in rope.table(0, 5000)))
    assert digest.hexdigest()[:16] == "f57a0103cdd549d2"
