"""Markdown on a terminal while it arrives: the text appears at once as it is, and each block that is complete is
replaced by its rendered form, in one write, so that nothing flickers and what has scrolled away stays as it is."""

from __future__ import annotations

import re
from collections.abc import Callable

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # a terminal that knows them shows what is between them at once


def split_block(text: str) -> tuple[str, str]:
    """The complete blocks of the text and the rest. A block ends with an empty line outside a fence, or with the line
    that closes its fence."""
    fence, end, place = "", 0, 0
    for line in text.splitlines(keepends=True):
        place += len(line)
        if not line.endswith("\n"):
            break
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip(" `~\n"):
                fence, end = "", place
        elif mark:
            fence = mark[1]
        elif not line.strip():
            end = place
    return text[:end], text[end:]


def rows_of(text: str, width: int) -> int:
    """Number of line breaks that a terminal of this width makes for the text, those at its edge included."""
    from rich.cells import cell_len, get_character_cell_size

    rows = 0
    for number, line in enumerate(text.expandtabs(8).split("\n")):
        rows += number > 0
        if cell_len(line) <= width:
            continue
        column = 0
        for character in line:
            size = get_character_cell_size(character)
            if column + size > width:
                rows, column = rows + 1, 0
            column += size
    return rows


class MarkdownView:
    """Writes a text in Markdown with `write`. size: gives the columns and rows of the terminal."""

    def __init__(self, write: Callable[[str], object], size: Callable[[], tuple[int, int]], colour: bool = True):
        self._write, self._size, self._colour = write, size, colour
        self._raw = ""  # shown as it is since the last block
        self._any = False  # whether a block was rendered

    def push(self, text: str) -> None:
        """Shows more of the text."""
        text = text.replace("\t", "    ")
        before, self._raw = self._raw, self._raw + text
        done, rest = split_block(self._raw)
        if not done:
            return self._show(text)
        self._replace(before, done, text, rest)
        self._raw = rest

    def flush(self) -> None:
        """Ends the text: renders the last block. The cursor is then at the beginning of a line."""
        if self._raw.strip():
            self._replace(self._raw, self._raw, "", "")
        elif self._raw:
            self._write("\n")
        self._raw, self._any = "", False

    def _show(self, text: str) -> None:
        if text:
            self._write(text)

    def _replace(self, shown: str, done: str, more: str, rest: str) -> None:
        """Renders `done` over what is shown, and then shows `rest`. What is higher than the terminal stays as it is,
        with `more` after it, since what has scrolled away cannot be replaced."""
        width, height = self._size()
        rows = rows_of(shown, width)
        if rows >= height:
            return self._show(more if more else "\n")
        up = f"\x1b[{rows}A" if rows else ""
        self._write(f"{_BEGIN}{up}\r\x1b[J{self._rendered(done, width)}{rest}{_END}")

    def _rendered(self, text: str, width: int) -> str:
        if not text.strip():
            return ""
        from io import StringIO

        from rich.console import Console
        from rich.markdown import Markdown

        out = StringIO()
        console = Console(
            file=out,
            width=width,
            force_terminal=True,
            color_system="standard" if self._colour else None,
            highlight=False,
        )
        console.print(Markdown(text, hyperlinks=False, code_theme="ansi_dark"))
        lines = [line.rstrip() for line in out.getvalue().strip("\n").split("\n")]
        gap, self._any = "\n" if self._any else "", True
        return gap + "\n".join(lines) + "\n"
