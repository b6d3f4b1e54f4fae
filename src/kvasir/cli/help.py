"""What --help prints: usage, description, and panels of arguments, options and commands.

Typer's own panels cut the names of options that do not fit into the terminal; here every name stands whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvasir.cli.panels import by_panel
from kvasir.cli.peer_names import advice

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

UsageError: Any = typer.BadParameter.__base__  # Typer exports it under no name
WIDEST = 120  # columns; longer lines are hard to read
_KINDS = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH", "bool": ""}
_NAME = re.compile(r"-{1,2}[a-z0-9][\w-]*")

Rows = list[tuple[str, str]]


class Command(TyperCommand):
    def get_usage(self, ctx: Any) -> str:
        return _usage(self, ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The error of a missing argument says what it is, and that of another engine's option what to give here."""
        given = list(args)  # parsing takes words out of args
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            known = {name for p in self.params for name in (*p.opts, *p.secondary_opts)}
            if text := advice(given, known):
                raise UsageError(text, ctx) from None
            if isinstance(error, typer.BadParameter):
                error.message = error.message or getattr(error.param, "help", None) or ""
            raise


class Group(TyperGroup):
    def get_usage(self, ctx: Any) -> str:
        return _usage(self, ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_help(self, ctx)


class App(typer.Typer):
    """A Typer whose commands print this help."""

    def __init__(self, cls: type[TyperGroup] = Group, **settings: Any):
        super().__init__(
            cls=cls, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}, **settings
        )

    def command(self, name: str | None = None, **settings: Any) -> Any:  # type: ignore[override]
        return super().command(name, cls=Command, **settings)


def _print_help(command: Any, ctx: Any) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    console = Console(highlight=False, width=min(console.width, WIDEST))
    console.print(Padding(Text(command.get_usage(ctx), style="bold"), (1, 1, 0, 1)))
    for paragraph in _paragraphs(command.help or ""):
        console.print(Padding(_described(paragraph), (1, 1, 0, 1)))
    console.print()
    shown = [p for p in command.get_params(ctx) if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    _print_panel(console, "Arguments", [(_argument(p), _help(p, ctx)) for p in arguments])
    options = [p for p in shown if p.param_type_name == "option"]
    for title, members in by_panel(options).items():
        _print_panel(console, title, [(_names(p, ctx), _help(p, ctx)) for p in members])
    for title, rows in _commands(command, ctx).items():
        _print_panel(console, title, rows)


def _usage(command: Any, ctx: Any) -> str:
    arguments = [p for p in command.get_params(ctx) if p.param_type_name == "argument"]
    words = [_argument(p) if p.required else f"[{_argument(p)}]" for p in arguments]
    return " ".join(("Usage:", ctx.command_path, "[OPTIONS]", *words, *["COMMAND"] * isinstance(command, TyperGroup)))


def _paragraphs(text: str) -> list[str]:
    """Without the line breaks of the source."""
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def _described(paragraph: str) -> Text:
    from rich.text import Text

    kind, colon, example = paragraph.partition(": ")
    if kind == "Example" and colon:
        return Text.assemble(("Example: ", "dim"), example)
    return Text(paragraph)


def _argument(param: Any) -> str:
    return param.name + "..." * (param.nargs != 1)


def _help(param: Any, ctx: Any) -> str:
    record = param.get_help_record(ctx)
    return record[1] if record else ""


def _names(param: Any, ctx: Any) -> str:
    """-n, --max-tokens NUMBER"""
    kind = param.metavar or _kind(param.get_help_record(ctx)[0])
    both = [", ".join(sorted(names, key=lambda n: n.startswith("--"))) for names in (param.opts, param.secondary_opts)]
    return f"{' / '.join(filter(None, both))} {kind}".strip()


def _kind(names: str) -> str:
    """Of typer's "--port <int range>": TEXT, NUMBER, PATH or the choices; empty for a switch."""
    found = re.search(r"<(?:list\[)?([^]>]+?)(?: range)?\]?>$", names)
    return _KINDS.get(found[1].lower(), found[1]) if found else ""


def _commands(group: Any, ctx: Any) -> dict[str, Rows]:
    """The commands of a group, by panel."""
    panels: dict[str, Rows] = {}
    for name in group.list_commands(ctx) if isinstance(group, TyperGroup) else ():
        child = group.commands[name]
        if not child.hidden:
            title = getattr(child, "rich_help_panel", None)
            rows = panels.setdefault(title if isinstance(title, str) else "Commands", [])
            rows.append((name, next(iter(_paragraphs(child.help or "")), "")))
    return panels


def _print_panel(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    from rich.panel import Panel
    from rich.table import Table

    if not rows:
        return
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(width=_width(console, [name for name, _ in rows]))
    table.add_column(ratio=1)
    for name, text in rows:
        table.add_row(_coloured(name), _text_of(text))
    console.print(Panel(table, title=title, title_align="left", border_style="dim"))


def _width(console: Console, names: Iterable[str]) -> int:
    """Of the column of names: as its longest word at least, and as the longest line if that leaves enough for help."""
    lines = [len(name) for name in names]
    words = [len(word) for name in names for word in name.split()]
    return max(*words, min(max(lines), console.width * 2 // 5))


def _coloured(names: str) -> Text:
    from rich.text import Text

    text = Text(names)
    if not _NAME.match(names):
        return Text(names, style="bold cyan")
    text.highlight_regex(_NAME, "bold cyan")
    text.highlight_regex(r"[A-Z]{3,}(\.\.\.)?|(?<= )[\w|]+$", "yellow")
    return text


def _text_of(text: str) -> Text:
    from rich.text import Text

    found = Text(text)
    found.highlight_regex(r"\[[^][]*\]$", "dim")
    return found
