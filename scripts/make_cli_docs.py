#!/usr/bin/env python3
"""Generates docs/cli.md from the commands: every argument and option with its meaning, default and bounds.

python scripts/make_cli_docs.py            writes the page
python scripts/make_cli_docs.py --check    exits with 1 if the page is stale
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from kvasir.cli.app import app
from kvasir.cli.peer_flags import PeerFlags
from kvasir.config import EngineOptions

PAGE = Path(__file__).parent.parent / "docs/cli.md"
HEAD = """# Commands

All commands and options, generated from the code by `python scripts/make_cli_docs.py`. `kvasir COMMAND --help` shows
the same in the terminal. An option marked *repeatable* may be given several times. The options of the engine are the
same for all commands that load a model; they are listed once, under [Engine options](#engine-options).
"""
ENGINE = "## Engine options\n\nOf every command that loads a model: {}.\n"
QUANTITIES = {"SIZE": "size (`8GB`, `8GiB`)", "TOKENS": "tokens (`4096`, `4k`)", "FORMAT": "format (`bf16`)"}
SHARED = "Also all [engine options](#engine-options).\n"


def page() -> str:
    commands = list(_commands(typer.main.get_command(app), "kvasir"))
    engine = _engine_options() & {
        p.name for name, command in commands if name == "kvasir serve" for p in command.params
    }
    taking = [name for name, command in commands if engine <= {p.name for p in command.params}]
    parts = [HEAD]
    for name, command in commands:
        parts += _command(name, command, engine if name in taking else set())
    first = next(command for name, command in commands if name == taking[0])
    parts.append(ENGINE.format(", ".join(f"`{name}`" for name in taking)))
    parts += _table([p for p in first.params if p.name in engine])
    return "\n".join(parts).rstrip() + "\n"


def _engine_options() -> set[str]:
    """Names of the parameters that `engine_flags` adds."""
    return {f.name for group in (EngineOptions, PeerFlags) for f in fields(group)} - {"model"}


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All commands below this one, with their full names."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    if getattr(command, "invoke_without_command", False):
        yield name, command
    for key, child in inner.items():
        if not child.hidden:
            yield from _commands(child, f"{name} {key}")


def _command(name: str, command: Any, shared: set[str]) -> Iterator[str]:
    yield f"## {name}\n"
    text, examples = _help(command.help or "")
    yield text + "\n"
    if examples:
        yield "```sh\n" + "\n".join(examples) + "\n```\n"
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name not in shared and not p.hidden]
    yield from _table(arguments)
    yield from _table(options)
    if shared:
        yield SHARED


def _help(text: str) -> tuple[str, list[str]]:
    """What a command does, and its examples."""
    parts = [re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text.replace("\b", ""))]
    examples = [
        re.sub(r" \((.*)\)$", r"  # \1", part.removeprefix("Example:").strip())
        for part in parts
        if part.startswith("Example:")
    ]
    return "\n\n".join(_cell(part) for part in parts if part and not part.startswith("Example:")), examples


def _table(parameters: list[Any]) -> Iterator[str]:
    if not parameters:
        return
    kind = "argument" if parameters[0].param_type_name == "argument" else "option"
    yield f"| {kind} | value | meaning |\n|---|---|---|"
    for parameter in parameters:
        yield f"| {_names(parameter)} | {_value(parameter)} | {_meaning(parameter)} |"
    yield ""


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name}`"
    longest_first = sorted(parameter.opts, key=lambda name: (not name.startswith("--"), parameter.opts.index(name)))
    return " ".join(f"`{name}`" for name in (*longest_first, *parameter.secondary_opts))


def _value(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False):
        return ""
    kind = _plain(parameter.type_descriptor.annotation)
    many = parameter.multiple or parameter.nargs == -1
    if parameter.metavar in QUANTITIES:
        text = QUANTITIES[parameter.metavar]
    elif typing.get_origin(kind) is typing.Literal:
        text = " ".join(f"`{choice}`" for choice in typing.get_args(kind))
    elif isinstance(kind, type) and issubclass(kind, Enum):
        text = " ".join(f"`{choice.value}`" for choice in kind)
    else:
        text = {str: "text", int: "integer", float: "number", Path: "path"}.get(kind, getattr(kind, "__name__", ""))
    low, high = parameter.min, parameter.max
    if low is not None or high is not None:
        text += f", at least {low}" if high is None else f", at most {high}" if low is None else f", {low} to {high}"
    return f"{text}, repeatable" if many else text


def _plain(kind: Any) -> Any:
    """The type of one value: without None, and without the list around it."""
    while typing.get_origin(kind) in (list, tuple, typing.Union, types.UnionType, typing.Annotated):
        arguments = [a for a in typing.get_args(kind) if a is not type(None)]
        kind = arguments[0]
    return kind


def _meaning(parameter: Any) -> str:
    text = _cell(re.sub(r"\s+", " ", getattr(parameter, "help", None) or "").strip())
    default = parameter.default
    if callable(default) or default in (None, (), [], "") or parameter.required or "efault" in text:
        return text
    if isinstance(default, bool):
        return f"{text} Default: {'on' if default else 'off'}."
    return f"{text} Default: `{getattr(default, 'value', default)}`."


def _cell(text: str) -> str:
    """Text whose characters mean nothing to Markdown, except backquotes."""
    parts = text.split("`")
    plain = [re.sub(r"([|*<\[_])", r"\\\1", part) for part in parts[::2]]
    quoted = [part.replace("|", "\\|") for part in parts[1::2]]
    return (
        "`".join(part for pair in zip(plain, [*quoted, ""], strict=False) for part in pair).rstrip("`")
        if quoted
        else plain[0]
    )


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text() == text
        print(f"{PAGE} is {'up to date' if same else f'stale; run python {__file__}'}")
        return 0 if same else 1
    PAGE.write_text(text)
    print(f"wrote {PAGE}: {text.count(chr(10) + '## ') - 1} commands")
    return 0


if __name__ == "__main__":
    sys.exit(main())
