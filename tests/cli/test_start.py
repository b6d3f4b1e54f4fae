"""The command line itself: help with examples, a fast start, errors for people."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvasir import __version__
from kvasir.cli.app import app
from kvasir.cli.panels import FIRST, MORE, by_panel
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
    first = _first_panel("run")
    wanted = (
        "--temperature --max-tokens -n --ctx-size -c --dtype --quantize --threads --seed --speculate --lora --top-p"
    )
    assert all(name in first for name in wanted.split())
    first = _first_panel("serve")
    assert all(name in first for name in "--host --port --api-key --ctx-size --quantize --replicas --lora".split())


@pytest.mark.parametrize("command", ["run", "chat", "bench", "pull", "show"])
def test_the_error_of_a_missing_argument_says_what_it_is(command):
    result = CliRunner().invoke(app, [command], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and re.search(r"Missing argument 'model'\. \w+", result.output), result.output


def _first_panel(command: str) -> str:
    """Of the options, on a terminal of 80 columns."""
    output = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    first = output[output.index("─ Options ─") :]
    return first[: first.index("╰")]


def _all_commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name, child in getattr(group, "commands", {}).items():
        yield from _all_commands(child, (*path, name))


@pytest.mark.parametrize(
    "path, command",
    [*_all_commands(get_command(app))],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_help_has_every_name_whole_in_80_columns_and_the_twenty_most_common_options_first(path, command):
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0 and max(map(len, result.output.splitlines())) <= 80
    shown = set(re.findall(r"[^\s,│/]+", result.output))
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    assert {name for option in options for name in (*option.opts, *option.secondary_opts)} <= shown
    assert set(getattr(command, "commands", ())) <= shown
    panels = by_panel(options)
    assert sorted(map(id, options)) == sorted(id(option) for panel in panels.values() for option in panel)
    assert len(panels[FIRST]) <= 20
    if len(panels[FIRST]) < 19:  # then no other has an option that is common, and the command none of its own
        assert MORE not in panels


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
