"""Terminal output of commands: tables, formatted numbers, and sanitized text from outside."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

_WIDTH_OF_FILES = 160  # columns if the output is not a terminal
_VISIBLE = "\ufffd"
_COLUMN = re.compile(r" *(?:\S(?:[^ ]| (?! ))* {2,})?")  # up to a second column, or the indent
_SURROGATES = range(0xD800, 0xE000)  # no terminal encoding can represent them
_CONTROLS = {i: _VISIBLE for i in (*range(32), *range(127, 160), *_SURROGATES) if chr(i) not in "\n\t"}


def plain(text: str) -> str:
    """The text with control characters replaced, so that no model and no file can control the terminal.

    Newlines and tabs stay.
    """
    return text.translate(_CONTROLS)


def fitted(text: str, file: TextIO) -> str:
    """The text with lines broken between words at the width of the terminal; as it is if the file is none."""
    return wrapped(text, shutil.get_terminal_size().columns) if file.isatty() else text


def wrapped(text: str, width: int) -> str:
    """Lines broken between words. What is broken continues below its column: that after two or more spaces."""
    lines = []
    for line in text.split("\n"):
        found = _COLUMN.match(line)
        indent = " " * (len(found[0]) if found and len(found[0]) <= width // 2 else 0)
        breaks = textwrap.TextWrapper(
            width, subsequent_indent=indent, replace_whitespace=False, break_long_words=False, break_on_hyphens=False
        )
        lines += breaks.wrap(line) or [""]
    return "\n".join(lines)


def bytes_text(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def count_text(count: int) -> str:
    """3670016 -> "3.67 M"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.2f} {unit}"
    return str(count)


def number_text(value: float) -> str:
    """Three significant digits, without an exponent between 1e-6 and 1e9."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.3g}" if digits > 8 else f"{value:,.{digits}f}"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Prints rows under columns; a column whose name begins with ">" is right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(str(cell)).replace("\n", " ")) for cell in row))
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    console = Console(file=sys.stdout, width=width, highlight=False)
    console.print(Text(f"\n{plain(title)}", style="bold"), table) if title else console.print(table)


def print_pairs(pairs: Iterable[tuple[str, Any]]) -> None:
    """Prints one line per (name, value) pair."""
    for name, value in pairs:
        print(fitted(f"{plain(name):<14} {plain(str(value))}".rstrip(), sys.stdout))


def print_json(value: Any) -> None:
    """Prints strict JSON: numbers that JSON cannot represent become strings."""
    print(json_text(value))


def json_text(value: Any) -> str:
    """Strict JSON. Lone surrogates are escaped, since they cannot be printed."""
    text = json.dumps(_strict(value), indent=2, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace").decode()


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
