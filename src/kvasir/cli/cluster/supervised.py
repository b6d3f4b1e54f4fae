"""The end of a process whose supervisor is gone: its standard input, a pipe from there, ends."""

from __future__ import annotations

import os
import signal
import sys
from threading import Thread


def end_with_input() -> None:
    """Lets this process end by SIGTERM when its standard input ends."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=wait, name="supervisor's end", daemon=True).start()
