"""Compiles some kernels for each GPU, in a process without the interpreter. `make kernels` compiles all of them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.cli.running import ROOT, environment

# Not imported here: Triton would not be an interpreter for the tests that this process runs later.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the extra gpu is not installed")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_the_kernels_of_dense_models_compile(target):
    options = ["--check", "--sets", "models", "--targets", target]
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiled", *options],
        env=environment(TRITON_INTERPRET="0"), cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no spills" in done.stdout
