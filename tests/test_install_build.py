"""What `pip install .` shows of the native build: that it runs, and at its end that there is no compiler."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CMAKE = shutil.which("cmake", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
LINE = "compiling the native kernels, a few minutes"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CMAKE is None, reason="cmake is not installed")]


def on_terminal(command: list[str]) -> tuple[str, int]:
    """What a command shows on a terminal of its own, and its exit status; its output goes nowhere, as with pip."""
    child, terminal = pty.fork()
    if child == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        os.execv(command[0], command)
    shown = b""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # the command has ended
            data = b""
        if not data:
            break
        shown += data
    os.close(terminal)
    return shown.decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("state, is_shown", [("wheel", True), ("editable", False)])
def test_a_build_of_a_wheel_says_on_the_terminal_what_it_does(state, is_shown, tmp_path):
    assert CMAKE
    shown, status = on_terminal([CMAKE, "-S", str(ROOT), "-B", str(tmp_path), f"-DSKBUILD_STATE={state}"])
    assert status == 0 and (LINE in shown) is is_shown


def test_a_build_without_a_terminal_is_silent(tmp_path):
    command = [CMAKE, "-S", ROOT, "-B", tmp_path, "-DSKBUILD_STATE=wheel"]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    assert done.returncode == 0 and LINE not in done.stdout + done.stderr


def test_an_install_without_a_compiler_ends_with_what_to_do(tmp_path):
    pytest.importorskip("scikit_build_core")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", tmp_path]
    command += ["-C", f"build-dir={tmp_path / 'build'}", ROOT]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "CXX": "/none/c++", "NO_COLOR": "1"}, timeout=100
    )
    assert done.returncode == 1
    end = (done.stdout + done.stderr).partition("CMake configuration failed")[2]
    assert "install a C++ compiler (g++ or clang++) and run the same command again" in end
    assert "pip install --config-settings=wheel.cmake=false '.[torch]'" in end
    assert len(end.splitlines()) < 12
