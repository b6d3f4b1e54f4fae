"""`kvasir serve` from the command line: what ends it before it serves."""

from __future__ import annotations

import os
import socket
import tempfile

import psutil

from tests.cli.running import run


def test_a_taken_port_is_reported_and_no_engine_stays():
    with socket.socket() as taken, tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("kvasir.cli", "serve", "kvasir-mini", "--port", port, XDG_RUNTIME_DIR=sockets)
        assert done.returncode == 2 and port in done.stderr and "\n  try: " in done.stderr
        assert "Traceback" not in done.stderr
        assert not os.listdir(sockets)
        assert not [p for p in psutil.process_iter(["cmdline"]) if sockets in " ".join(p.info["cmdline"] or ())]
