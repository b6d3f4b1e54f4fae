"""The native kernels: loaded or clearly refused, and the same bits on every instruction set."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.errors import ConfigError
from kvasir.ops import native
from tests.fresh import WITHOUT_TORCH
from tests.isas import isas, restore_isa  # noqa: F401

LANES = 16
needs_library = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c with one rounding.

    The product is exact in float64; the sum is rounded there to odd, which makes the second rounding, to
    float32, the only one that counts (Boldo and Melquiond, 2008).
    """
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & is_even, odd, total).astype(np.float32)


def exact_rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """The contract of csrc/kvasir_cpu.h in float32 steps, for values without denormals on the way."""
    rows, cols = x.shape
    padded = np.zeros((rows, -(-cols // LANES) * LANES), np.float32)
    padded[:, :cols] = x
    lane = np.zeros((rows, LANES), np.float32)
    for start in range(0, padded.shape[1], LANES):
        part = padded[:, start : start + LANES]
        lane = fma(part, part, lane)
    while lane.shape[1] > 1:
        half = lane.shape[1] // 2
        lane = lane[:, :half] + lane[:, half:]
    factor = np.float32(1) / np.sqrt(lane / np.float32(cols) + np.float32(eps))
    return x * factor * weight


def run(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    out = np.full_like(x, 7.0)
    native.rms_norm_arrays(out, x, weight, eps)
    return out


def sample(rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(0, 3, (rows, cols)).astype(np.float32)
    return x, random.normal(1, 0.2, cols).astype(np.float32)


def bits(array: np.ndarray) -> np.ndarray:
    """Comparable bits, every NaN the same."""
    return np.where(np.isnan(array), np.float32(np.nan), array).view(np.int32)


@needs_library
@pytest.mark.parametrize("cols", [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 127, 1023, 1024, 4099])
def test_rms_norm_has_the_bits_of_its_contract_on_every_isa(cols):
    x, weight = sample(3, cols, seed=cols)
    expected = exact_rms_norm(x, weight, 1e-6)
    for name in isas():
        native.force_isa(name)
        assert np.array_equal(bits(run(x, weight)), bits(expected)), name


@needs_library
@settings(deadline=None)
@given(rows=st.integers(1, 4), cols=st.integers(1, 200), seed=st.integers(0, 1 << 30), scale=st.integers(-20, 20))
def test_rms_norm_has_equal_bits_on_all_isas(rows, cols, seed, scale):
    x, weight = sample(rows, cols, seed)
    x *= np.float32(2.0**scale)
    results = []
    for name in isas():
        native.force_isa(name)
        results.append(bits(run(x, weight)))
    native.force_isa(None)
    assert all(np.array_equal(result, results[0]) for result in results)


@needs_library
def test_rms_norm_of_hostile_values_has_equal_bits_on_all_isas():
    values = np.array([0.0, -0.0, 1e-42, -1e-38, 3e38, -3e38, np.inf, -np.inf, np.nan, 1.0], np.float32)
    random = np.random.default_rng(0)
    x = random.choice(values, (300, 21), p=[0.3, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.05, 0.15])
    weight = random.choice(values, 21)
    results = []
    for name in isas():
        native.force_isa(name)
        results.append(bits(run(x, weight, eps=0.0)))
    assert all(np.array_equal(result, results[0]) for result in results)
    assert 0 < np.isnan(run(x, weight, eps=0.0)).mean() < 1


@needs_library
def test_rms_norm_agrees_with_float64():
    x, weight = sample(5, 1536)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight
    # Three roundings after a sum whose own error is a few units in the last place.
    np.testing.assert_allclose(run(x, weight), expected, rtol=1e-6)


@needs_library
def test_a_row_does_not_see_its_neighbours():
    x, weight = sample(6, 77)
    together = run(x, weight)
    x_nan = x.copy()
    x_nan[[0, 2, 5]] = np.nan
    beside_nan = run(x_nan, weight)
    for row in (1, 3, 4):
        alone = run(x[row : row + 1].copy(), weight)[0]
        assert np.array_equal(bits(alone), bits(together[row]))
        assert np.array_equal(bits(alone), bits(beside_nan[row]))


@needs_library
def test_rms_norm_may_work_in_place_and_writes_nothing_else():
    x, weight = sample(3, 37)
    expected = run(x, weight)
    memory = np.full(3 * 37 + 32, 5.0, np.float32)
    rows = memory[16:-16].reshape(3, 37)
    rows[:] = x
    native.rms_norm_arrays(rows, rows, weight, 1e-6)
    assert np.array_equal(bits(rows), bits(expected))
    assert (memory[:16] == 5).all() and (memory[-16:] == 5).all()


@needs_library
def test_the_threads_denormal_setting_does_not_reach_the_bits():
    torch = pytest.importorskip("torch")
    x = np.full((1, 20), 1e-20, np.float32)
    weight = np.full(20, 1e-39, np.float32)
    results = []
    for flush in (False, True):
        thread = threading.Thread(
            target=lambda flush=flush: (
                torch.set_flush_denormal(flush),
                results.append(run(x, weight, 1e-30)),
            )
        )
        thread.start()
        thread.join()
    assert np.array_equal(bits(results[0]), bits(results[1]))
    assert (results[0] == 0).all()  # a denormal weight counts as zero
    assert np.float32(1e-39) != 0  # and this thread's own setting is as it was


@needs_library
def test_tensors_are_taken_by_address():
    torch = pytest.importorskip("torch")
    x, weight = sample(4, 50)
    out = torch.empty(2, 2, 50)
    native.rms_norm_arrays(out, torch.from_numpy(x).view(2, 2, 50), torch.from_numpy(weight), 1e-6)
    assert np.array_equal(bits(out.view(4, 50).numpy()), bits(run(x, weight)))


@needs_library
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.ones((2, 8), np.float64)}, "x.*float32"),
        ({"out": np.ones((2, 7), np.float32)}, r"out.*\(2, 8\)"),
        ({"weight": np.ones(9, np.float32)}, r"weight.*\(8,\)"),
        ({"x": np.ones((8, 2), np.float32).T}, "x.*dense"),
        ({"out": np.broadcast_to(np.float32(1), (2, 8))}, "out.*dense"),
        ({"out": np.frombuffer(bytes(64), np.float32).reshape(2, 8)}, "out.*writable"),
        ({"x": np.ones((2, 0), np.float32)}, "x must have 1"),
        ({"x": np.ones((), np.float32)}, "x must have 1"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    ones = np.ones((2, 8), np.float32)
    arguments = {"out": ones.copy(), "x": ones, "weight": ones[0]} | change
    with pytest.raises(ValueError, match=message):
        native.rms_norm_arrays(**arguments, eps=1e-6)


@needs_library
def test_zero_rows_are_accepted():
    assert run(np.ones((0, 8), np.float32), np.ones(8, np.float32)).shape == (0, 8)


@needs_library
def test_the_isa_can_be_forced_and_restored():
    best = native.force_isa(None)
    assert best == isas()[-1]
    assert native.force_isa("portable") == native.isa() == "portable"
    with pytest.raises(ConfigError, match="'sse9'"):
        native.force_isa("sse9")
    assert native.isa() == "portable"
    assert native.lib().kvasir_set_isa(len(native.ISAS)) == -1
    assert native.isa() == "portable"


@needs_library
def test_the_best_isa_follows_from_the_features():
    features = set(native.cpu_features())
    has_avx2 = {"avx2", "fma", "f16c"} <= features
    has_avx512 = has_avx2 and ({"avx512f", "avx512vnni", "avx512bf16"} <= features or "emulated-avx512" in features)
    assert isas() == list(native.ISAS[: 1 + has_avx2 + has_avx512])


def test_an_absent_library_is_refused_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "NAMED", "")
    with pytest.raises(ConfigError, match=r"not built .*compiler"):
        native.load(tmp_path / "libkvasir_cpu.so")


def test_a_named_library_that_is_absent_is_refused_by_its_name(tmp_path, monkeypatch):
    path = tmp_path / "absent.so"
    monkeypatch.setattr(native, "NAMED", str(path))
    with pytest.raises(ConfigError, match=f"KVASIR_LIBRARY names {path}.*unset"):
        native.load(path)


def test_a_broken_library_is_refused(tmp_path):
    path = tmp_path / "libkvasir_cpu.so"
    path.write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(ConfigError, match=str(path)):
        native.load(path)


@needs_library
def test_a_library_of_another_abi_is_refused(monkeypatch):
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    with pytest.raises(ConfigError, match="have ABI"):
        native.load(native.PATH)


def test_without_a_library_the_module_imports_and_states_the_reason():
    code = (
        "import pathlib; from kvasir.ops import native\n"
        "assert 'torch' not in sys.modules\n"
        "native.PATH = pathlib.Path('/nowhere/lib.so')\n"
        "assert not native.available()\n"
        "print(native.reason())\n"
        "try: native.isa()\n"
        "except native.ConfigError as error: assert str(error) == native.reason()\n"
        "else: raise SystemExit('no error')"
    )
    source = Path(native.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], env={"PYTHONPATH": str(source)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "not built" in done.stdout and "compiler" in done.stdout
