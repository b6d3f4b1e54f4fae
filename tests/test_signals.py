"""The tests pass as a background job, under nohup, and under a parent that ignores the signals they send."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.running import ROOT, environment
from tests.signals import INHERITED

CHILD = f"""
import signal
print([s.name for s in map(signal.Signals, {[*map(int, INHERITED)]}) if signal.getsignal(s) == signal.SIG_IGN])
"""
STARTS = "import subprocess, sys; {}; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"


def ignored(prelude: str) -> str:
    """What a process ignores that was started from Python, that was started from a shell that ignores all."""
    script = 'trap "" INT TERM HUP QUIT; exec "$0" -c "$1" "$2"'
    command = ["sh", "-c", script, sys.executable, STARTS.format(prelude), CHILD]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("prelude", "left"),
    [("pass", "['SIGINT', 'SIGTERM', 'SIGHUP', 'SIGQUIT']"), ("import tests.conftest", "[]")],
)
def test_processes_of_the_tests_begin_with_the_default_actions(prelude, left):
    assert ignored(prelude).strip() == left
