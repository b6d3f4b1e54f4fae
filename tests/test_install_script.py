"""The script that installs a checkout: progress of the build, its failure, a missing compiler. Pip is a stand-in."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "install_kvasir.sh"


@pytest.fixture
def install(tmp_path):
    """Runs the script with a pip that prints `steps` lines of a build and exits with `status`."""

    def run(status: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        pip = tmp_path / "pip"
        pip.write_text(
            f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\n'
            f"for i in $(seq 8); do echo \"  [$i/8] Building CXX object\"; done\necho 'error: x' >&2\nexit {status}\n"
        )
        pip.chmod(0o755)
        command = ["bash", str(SCRIPT), str(pip), "install"]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=60)

    return run


def compiler(tmp_path, status: int) -> str:
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/bash\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_the_build_shows_that_it_is_running(install, tmp_path):
    done = install(CXX=compiler(tmp_path, 0))
    assert done.returncode == 0
    shown = [line for line in done.stdout.splitlines() if " of 8" in line]
    assert shown == [f"Building native kernels: {n} of 8" for n in (2, 4, 6, 8)]
    assert "error: x" not in done.stdout + done.stderr
    assert "-vv --no-build-isolation -e .[demo]" in (tmp_path / "calls").read_text()


def test_a_failed_build_is_reported_with_its_reason(install, tmp_path):
    done = install(status=1, CXX=compiler(tmp_path, 0))
    assert done.returncode == 1
    assert "error: x" in done.stderr and "could not be installed" in done.stderr.splitlines()[-1]


def test_a_missing_compiler_is_reported_at_the_end_as_well(install, tmp_path):
    done = install(CXX=compiler(tmp_path, 1))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert (
        "No C++ compiler found" in lines[0] and "No C++ compiler found" in lines[-2] and "apt install g++" in lines[-1]
    )
    # The short form of this option, -C, is not known to the pip of Python 3.11.
    assert "--config-settings=wheel.cmake=false" in (tmp_path / "calls").read_text()
