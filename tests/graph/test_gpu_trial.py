"""The tests that need a GPU run without one, in Triton's interpreter, so that they do not break unnoticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")


@pytest.mark.slow
def test_the_tests_of_the_graph_executor_run_in_the_interpreter():
    root = Path(__file__).parents[2]
    env = {**os.environ, "KVASIR_GPU_DRY": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu/test_graph.py"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-4000:]
