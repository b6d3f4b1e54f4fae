"""The command line itself: help with examples, a fast start, errors for people."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvasir import __version__
from kvasir.cli.app import app
from tests.cli.running import environment, run

COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_that_parses(name):
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    found = re.search(r"Example: kvasir (.*)", result.output)
    assert found and found[1].split()[0] == name
    assert len(result.output.splitlines()) > 5


def test_help_names_every_command():
    result = CliRunner().invoke(app, ["--help"])
    assert {"serve", "run", "chat", "bench", "inspect", "doctor"} <= set(COMMANDS)
    assert all(f"│ {name} " in result.output for name in COMMANDS)
    assert result.output.index("│ run ") < result.output.index("│ serve ")


def test_the_most_common_options_are_in_the_first_panel():
    output = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "140"}).output
    first = output[output.index("─ Options ─") :]
    first = first[: first.index("╰")]
    wanted = (
        "--temperature --max-tokens -n --ctx-size -c --dtype --quantize --threads --seed --speculate --lora --top-p"
    )
    assert all(name in first for name in wanted.split())
    assert len(re.findall(r"^│ --", first, re.MULTILINE)) <= 23


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["bench", "--help"]])
def test_no_heavy_library_is_imported_for_it(arguments):
    command = [sys.executable, "-X", "importtime", "-m", "kvasir.cli", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "kvasir.cli.app" in imported
    heavy = {"torch", "numpy", "tokenizers", "msgspec", "fastapi", "zmq", "jinja2", "prompt_toolkit"}
    assert not heavy & imported
    assert ("rich" in imported) == ("--help" in arguments)  # draws the panels
    assert len(imported) < (600 if "--help" in arguments else 350)


def test_the_version_is_printed():
    assert CliRunner().invoke(app, ["--version"]).output == f"kvasir {__version__}\n"


def test_an_error_has_a_next_step_and_no_trace():
    done = run("kvasir.cli", "inspect", "no/such/file.gguf")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: no/such/file.gguf") and "\n  try: " in done.stderr
    assert "Traceback" not in done.stderr
