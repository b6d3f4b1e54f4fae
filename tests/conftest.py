"""Shared set-up of all tests: no deadline per example, since machines are shared.

The fast tests draw the same few examples every time, so that a verdict is about the change and not about the day;
`make test-all` draws many new ones (`--hypothesis-profile=explore`) and prints how to draw a failing one again."""

import atexit
import contextlib
import gc
import importlib.util
import os
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, settings

from kvasir.environment import prepare_torch
from kvasir.sched import lane
from tests.signals import heed

SLOW_SECONDS = 1200

gc.disable()  # until the tests are collected: what that makes is a million objects that stay
heed()  # before any test starts a process
prepare_torch()  # as every engine does before torch is imported
os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton obeys what is set when it is first imported, here by any test
lane.LEAST = 1  # tests have few rows; test servers are separate processes and use the package's value

settings.register_profile(
    "kvasir", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=12
)
settings.register_profile(
    "explore", settings.get_profile("kvasir"), derandomize=False, print_blob=True, max_examples=100
)
settings.load_profile("kvasir")


@pytest.fixture(scope="module", autouse=True)
def kernels_are_chosen_anew():
    """An engine chooses the kernels of its process. What models compute in the next module shall not depend on it."""
    yield
    if registry := sys.modules.get("kvasir.ops.registry"):
        for op in registry.OPS.values():
            op.chosen.clear()
            op.choices.clear()


def pytest_configure(config):
    """What does not run, because -x ends the tests before, is no unused snapshot."""
    if config.option.maxfail:
        config.option.disable_unused_snapshots = True


def pytest_collection(session):
    """In a clean checkout, what a worker has compiled is there for the others: each begins with other modules."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if count == 1 or session.config.args != session.config.getini("testpaths"):
        return
    modules = sorted(Path(__file__).parent.rglob("test_*.py"))
    begin = int(worker[2:]) * len(modules) // count
    for path in (*modules[begin:], *modules[:begin]):
        name = ".".join(path.relative_to(session.config.rootpath).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # said when it is collected
            importlib.import_module(name)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """`make test` makes no variants only to leave them out: slow ones, and all but N of a test marked `few(N)`."""
    if metafunc.config.option.markexpr.startswith("not slow"):
        left_out = {"slow", "gpu", "peers"}
        fast = [call for call in metafunc._calls if left_out.isdisjoint(mark.name for mark in call.marks)]
        if fast and (few := metafunc.definition.get_closest_marker("few")):
            fast = spread(fast, *few.args)
        metafunc._calls[:] = fast or metafunc._calls[:1]


def spread(variants, count):
    """So many of them, always the same ones, drawn: every n-th might all have the same value of a parameter."""
    chosen = Random(0).sample(range(len(variants)), min(count, len(variants)))
    return [variants[index] for index in sorted(chosen)]


def pytest_runtest_setup(item):
    """Without Ray, its tests are skipped, but a failure where everything is to run."""
    if item.get_closest_marker("ray") and importlib.util.find_spec("ray") is None:
        if item.config.option.markexpr.startswith("not gpu"):
            pytest.fail("Ray is missing: make env-fleet")
        pytest.skip("Ray is not installed: make env-fleet")


def pytest_collection_modifyitems(items):
    """A slow test may take minutes, and several times as many on a busy machine."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def pytest_collection_finish(session):
    """Collections of garbage look at what the tests make, and not again and again at all that was imported."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # with Python's own, collections take 4 % of the time
    gc.enable()
    atexit.register(gc.unfreeze)  # what is frozen when Python ends is taken apart in no order
