"""The commands as a user runs them: real processes, with pipes or on a separate terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
VOCABULARY = 2048  # of kvasir-mini, whose tokenizer and template the fake engine borrows


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def run(*command: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m <command>` with `stdin` piped in, its outputs captured."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=environment(**env), input=stdin, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


class Terminal:
    """A process on a pseudo terminal: what it shows so far, and keys typed into it."""

    def __init__(self, *command: str, **env: str):
        self._end, inside = pty.openpty()
        # Cursor position requests need a terminal that answers them.
        env = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "KVASIR_TEST_TTY": os.ttyname(inside), **env}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment(**env), stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
        )  # fmt: skip
        os.close(inside)
        self.shown = ""
        self._waited_for = 0  # what lies before this place was waited for

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def wait_for(self, text: str, timeout: float = 30.0, pressing: str = "") -> None:
        """Waits until `text` appears after the previously awaited text. `pressing`: a key pressed again every two
        seconds, as a person would: Python's input() can miss a Ctrl-C that comes in the moment before it waits."""
        deadline, press = time.monotonic() + timeout, time.monotonic()
        while (place := self.shown.find(text, self._waited_for)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown[self._waited_for :]!r}"
            if pressing and time.monotonic() >= press:
                self.type(pressing)
                press += 2.0
            self._read(0.1)
        self._waited_for = place + len(text)

    def end(self, timeout: float = 30.0) -> int:
        """Waits for the process's end, reading what it shows; the exit status."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running: {self.shown!r}"
            self._read(0.05)
        return self.process.returncode

    def _read(self, timeout: float) -> None:
        if select.select([self._end], [], [], timeout)[0]:
            try:
                self.shown += os.read(self._end, 65536).decode("utf-8", "replace")
            except OSError:  # the other side is closed
                time.sleep(timeout)
