"""Options of other engines that are refused: the error says what to give instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.peer_names import ADVICE

MIGRATION = (Path(__file__).parents[2] / "docs/migration.md").read_text()


def options(command: str) -> set[str]:
    found = get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {name for p in found for name in (*p.opts, *p.secondary_opts)}


@pytest.mark.parametrize("command", ["serve", "run"])
@pytest.mark.parametrize("name", ADVICE)
def test_the_error_of_another_engines_option_says_what_to_give(command, name):
    if name in options(command):
        pytest.skip("this command has it")
    for words in ((name, "4"), (f"{name}=4",)):
        done = CliRunner().invoke(app, [command, "kvasir-mini", *words], env={"COLUMNS": "200"})
        assert done.exit_code == 2 and f"No such option: {name}. {ADVICE[name]}" in done.output, done.output


def test_what_is_advised_exists():
    for text in ADVICE.values():
        assert set(re.findall(r"--[a-z-]+", text)) <= options("serve") | options("run"), text


def test_no_option_of_serve_is_refused_as_another_engines():
    assert not ADVICE.keys() & options("serve")


def test_a_mistyped_option_keeps_its_own_error():
    done = CliRunner().invoke(app, ["serve", "kvasir-mini", "--max-modle-len", "4k"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "--max-model-len" in done.output and "No such option: --max-modle-len" in done.output


@pytest.mark.parametrize("name", [name for name in ADVICE if name.startswith("--")])
def test_the_migration_page_has_the_option(name):
    """In one of its forms: a row may name the long or the short one."""
    same = [other for other, text in ADVICE.items() if text == ADVICE[name]]
    assert any(re.search(rf"`[^`]*{other}\b", MIGRATION) for other in same), same


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("-np", "4"), "max_num_seqs", 4),
        (("--parallel=4",), "max_num_seqs", 4),
        (("--max-running-requests", "4"), "max_num_seqs", 4),
        (("-t", "2"), "threads", 2),
        (("--context-length", "4k"), "max_model_len", 4096),
        (("--tp", "2"), "tensor_parallel", 2),
        (("--dp", "2"), "replicas", 2),
    ],
)
def test_an_option_of_the_same_meaning_is_accepted_under_another_engines_name(words, name, value):
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    with command.make_context("serve", ["kvasir-mini", *words]) as context:
        assert context.params[name] == value
