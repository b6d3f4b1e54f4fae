"""docs/cli.md is up to date, and the commands that pages show have the options that they use."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from kvasir.cli.app import app
from scripts import make_cli_docs
from tests.docs import PAGES, Block, blocks, is_shell, shell_lines

ROOT_COMMAND = typer.main.get_command(app)


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each kvasir command in a block, without redirections and what follows a pipe."""
    for line in shell_lines(block) if is_shell(block) else ():
        found = re.match(r"(?:[A-Z_]+=\S+ )*kvasir (.+)$", line)
        if not found:
            continue
        text = found[1]
        if " ... " in f"{text} ":  # options that the page leaves out may be required
            continue
        words = shlex.split(text)
        end = next((i for i, word in enumerate(words) if re.match(r"[|<>;&]|\d>", word)), len(words))
        yield words[:end]


def parse(words: list[str]) -> None:
    """Parses a command line and runs nothing. Raises an error of usage."""
    context = ROOT_COMMAND.make_context("kvasir", list(words))
    command: Any = ROOT_COMMAND
    rest = words
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, list(rest))
        context = command.make_context(name, list(rest), parent=context)
        if hasattr(command, "commands"):
            rest = [*context._protected_args, *context.args]
            if not rest:
                return


SHOWN = [(str(block), words) for page in PAGES for block in blocks(page) for words in commands(block)]


def test_many_commands_are_shown():
    assert len(SHOWN) > 60


@pytest.mark.parametrize(("place", "words"), SHOWN, ids=[f"{place} {' '.join(words)}"[:100] for place, words in SHOWN])
def test_a_shown_command_can_be_given(place, words):
    if {"--help", "-h", "--version"} & {*words} or not words:
        return
    parse(words)


def test_a_wrong_option_is_found():
    with pytest.raises(Exception, match="--nonsense"):
        parse(["serve", "kvasir-mini", "--nonsense"])


def test_the_page_of_commands_is_up_to_date():
    assert make_cli_docs.PAGE.read_text() == make_cli_docs.page(), "run python scripts/make_cli_docs.py"


def test_the_page_has_every_option():
    text = make_cli_docs.PAGE.read_text()
    for name, command in make_cli_docs._commands(ROOT_COMMAND, "kvasir"):
        assert f"\n## {name}\n" in text
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert all(f"`{flag}`" in text for flag in parameter.opts), (name, parameter.opts)
