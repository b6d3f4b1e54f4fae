"""The threads that run a step: they meet, they sleep when there is nothing to do, and they end."""

import subprocess
import sys
import time
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

import pytest

from kvasir.ops import native
from tests.fresh import WITHOUT_TORCH

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")


def calls() -> tuple[Callable, Callable, Callable]:
    return (
        native.declare("kvasir_pool_create", c_void_p, c_int32, c_int32, c_int32),
        native.declare("kvasir_pool_destroy", None, c_void_p),
        native.declare("kvasir_pool_selftest", c_int64, c_void_p, c_int64),
    )


@pytest.fixture
def pool():
    """Makes pools that end with the test."""
    create, destroy, _ = calls()
    made = []

    def make(threads: int, pin: bool = False, apart: bool = False) -> int:
        made.append(create(threads, pin, apart))
        assert made[-1]
        return made[-1]

    yield make
    for each in made:
        destroy(each)


def checksum(threads: int, rounds: int) -> int:
    """The sum over all rounds r and threads t of r * threads + t, as read by every thread."""
    n, r = threads, rounds
    return n * (n * n * r * (r - 1) // 2 + r * n * (n - 1) // 2)


@pytest.mark.parametrize("most", (500, pytest.param(3000, marks=pytest.mark.slow)))
@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize("pin", (False, True))
@pytest.mark.parametrize("threads", (1, 2, 3, 8))
def test_a_barrier_makes_all_writes_visible_to_all_threads(pool, threads, pin, apart, most):
    *_, selftest = calls()
    address = pool(threads, pin, apart)
    for rounds in (0, 1, 2, most):
        assert selftest(address, rounds) == checksum(threads, rounds)


@pytest.mark.slow
def test_more_threads_than_processors_are_not_slow(pool):
    """A barrier of 16 on two processors took 20 to 170 us; one that spins out its time slices takes milliseconds.

    Counted is what this process computes, since others may have the processors meanwhile."""
    *_, selftest = calls()
    address = pool(16)
    start = time.process_time()
    assert selftest(address, 2000) == checksum(16, 2000)
    assert time.process_time() - start < 10


def test_all_threads_wake_up_after_pauses(pool):
    """Threads wake up from pauses, yields and sleep, and none is missed."""
    *_, selftest = calls()
    address = pool(3)
    for wait in (0, 1e-5, 1e-4, 3e-4, 1e-3, 5e-3) * 10:
        time.sleep(wait)
        assert selftest(address, 2) == checksum(3, 2)


def test_an_idle_pool_is_quiet(pool):
    *_, selftest = calls()
    address = pool(2)
    selftest(address, 10)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.01


def test_pools_can_be_created_and_closed_repeatedly():
    create, destroy, selftest = calls()
    for i in range(100):
        address = create(1 + i % 5, i % 2, i % 3 == 0)
        if i % 3 == 0:
            assert selftest(address, 3) == checksum(1 + i % 5, 3)
        destroy(address)
    destroy(None)


@pytest.mark.parametrize("threads", (0, -1, 1025, 2**31 - 1))
def test_invalid_thread_counts_are_refused(threads):
    create, *_ = calls()
    assert create(threads, 0, 0) is None


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_pinned_threads_keep_to_the_processors_of_the_process():
    code = (
        "import os, ctypes\n"
        "os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\n"
        "from kvasir.ops import native\n"
        "create = native.declare('kvasir_pool_create', ctypes.c_void_p, *[ctypes.c_int32] * 3)\n"
        "run = native.declare('kvasir_pool_selftest', ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)\n"
        "allowed = os.sched_getaffinity(0)\n"
        "pool = create(3, 1, 0)\n"
        "run(pool, 10)\n"
        "found = [os.sched_getaffinity(int(t)) for t in os.listdir('/proc/self/task')]\n"
        "assert len(found) >= 3 and all(f == allowed for f in found), found\n"
    )
    run_python(code)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on memory that holds")
def test_a_pool_is_refused_if_the_system_has_no_threads_left():
    code = (
        "import resource, ctypes\n"
        "from kvasir.ops import native\n"
        "create = native.declare('kvasir_pool_create', ctypes.c_void_p, *[ctypes.c_int32] * 3)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)  # room for some stacks of 8 MB\n"
        "assert create(1000, 0, 0) is None\n"
        "assert create(2, 0, 0)\n"
    )
    run_python(code)


def run_python(code: str) -> None:
    source = Path(native.__file__).parents[2]
    environment = {"PYTHONPATH": str(source), "KVASIR_LIBRARY": str(native.PATH)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
