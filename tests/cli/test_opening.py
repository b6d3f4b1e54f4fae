"""What a server and other commands show of their start."""

from __future__ import annotations

import re

import pytest

from kvasir.cli.opening import ShownStart
from kvasir.engine.summary import warnings
from kvasir.serve.server import Opening
from tests.cli.running import Terminal

LINES = ("computes  bfloat16 on cpu", "tools     calls come back as content", "note      the context is cut")


def test_the_warnings_of_a_summary():
    assert warnings(LINES) == ["note: calls come back as content", "note: the context is cut"]
    assert warnings(()) == []


@pytest.mark.parametrize(
    ("verbose", "below"), [(False, warnings(LINES)), (True, [f"  {line}" for line in LINES])], ids=["quiet", "verbose"]
)
def test_a_start_is_one_line_and_the_warnings_or_all(verbose, below, capsys):
    with ShownStart("m", verbose) as started:
        assert started.progress is None  # no terminal
        started(Opening("m is served", LINES))
    out, err = capsys.readouterr()
    assert out.splitlines() == ["m is served", *below] and not err


@pytest.mark.slow
def test_a_server_on_a_terminal_shows_a_spinner_and_then_one_line():
    with Terminal("kvasir.cli", "serve", "kvasir-mini", "--port", "0") as server:
        server.wait_for("Loading kvasir-mini")
        server.wait_for("(no key needed)\r\n")
        server.process.terminate()
        server.end()
    last = server.shown.rpartition("\x1b[2K")[2]  # after the spinner
    assert re.fullmatch(r"Kvasir \S+ serves kvasir-mini at http://127\.0\.0\.1:\d+/v1 \(.*\)\r\n", last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("bench kvasir-mini --repeats 1 --output-len 8", "latency, runs"),
        ("bench grammar kvasir-mini --repeats 1", "grammars"),
        ("inspect kvasir-mini --quantize q8", "Quantizing kvasir-mini"),
        ("doctor", "Checking this machine"),
    ],
)
def test_long_commands_show_progress_on_a_terminal(line, shown):
    with Terminal("kvasir.cli", *line.split()) as command:
        command.wait_for(shown)
