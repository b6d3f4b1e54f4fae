#!/usr/bin/env python3
"""Takes the pictures of the terminal in the docs: real commands with the bundled model, on an emulated terminal.

    python scripts/make_terminal_images.py [NAME...]     writes docs/images/terminal-NAME.svg, by default all

Needs pyte (the dev extra), which emulates the terminal. The pictures name no font to fetch: they load nothing.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
COLUMNS = 80
PATIENCE = 300  # seconds, for a busy machine
SIZE = struct.Struct("HHHH")
FONTS = 'ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace'


class Terminal:
    """A command on an emulated terminal, which shows the command line first."""

    def __init__(self, line: str, rows: int, home: str):
        self._screen = pyte.Screen(COLUMNS, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._stream.feed(f"\x1b[32m$\x1b[0m {line}\r\n".encode())
        self._end, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, SIZE.pack(rows, COLUMNS, 0, 0))
        # Requests for the cursor's position need a terminal that answers them.
        env = {
            **os.environ,
            "TERM": "xterm-256color",
            "HOME": home,
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "XDG_STATE_HOME": home,
        }
        command = [Path(sys.executable).with_name("kvasir"), *shlex.split(line)[1:]]
        self._process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=env, cwd=home)
        os.close(inside)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, text: str) -> None:
        """Until the screen shows the text."""
        self._until(lambda: any(text in line for line in self._screen.display), text)

    def wait_for_end(self) -> None:
        self._until(lambda: self._process.poll() is not None, "the end")

    def settle(self, seconds: float) -> None:
        """Until the screen has not changed for so long."""
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            if self._read():
                begun = time.monotonic()

    def lines(self) -> list[Text]:
        """The screen without the empty lines at its end. Ends the command."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)
        while self._read():
            pass
        os.close(self._end)
        lines = [_text(self._screen.buffer[row]) for row in range(self._screen.lines)]
        while lines and not lines[-1].plain.strip():
            lines.pop()
        return lines

    def _until(self, done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not done():
            if time.monotonic() > until:
                raise SystemExit("\n".join((f"no {what!r} on the terminal:", *self._screen.display)))
            self._read()

    def _read(self) -> bool:
        """Feeds what the command has written to the emulator; whether there was anything."""
        if not select.select([self._end], [], [], 0.1)[0]:
            return False
        try:
            data = os.read(self._end, 1 << 16)
        except OSError:  # the command has ended
            return False
        self._stream.feed(data.replace(b"\x1b[2m", b"\x1b[90m"))  # pyte knows no faint text
        return bool(data)


def _text(row) -> Text:
    text = Text()
    for style, chars in groupby((row[column] for column in range(COLUMNS)), _style):
        text.append("".join(char.data for char in chars), style)
    text.rstrip()
    return text


def _style(char: pyte.screens.Char) -> Style:
    return Style(
        color=_color(char.fg),
        bgcolor=_color(char.bg),
        bold=char.bold,
        italic=char.italics,
        underline=char.underscore,
        reverse=char.reverse,
    )


def _color(name: str) -> str | None:
    """rich's name of a colour of pyte."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return name.replace("brown", "yellow").replace("bright", "bright_")


def draw(name: str, title: str, lines: list[Text]) -> Path:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text("\n").join(lines))
    svg = console.export_svg(title=title, theme=SVG_EXPORT_THEME, unique_id=f"terminal-{name}")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: (Fira Code, monospace|arial);", f"font-family: {FONTS};", svg)
    path = FOLDER / f"terminal-{name}.svg"
    path.write_text(svg, encoding="utf-8")
    return path


# -- the pictures ------------------------------------------------------------------------------------------


def run(home: str) -> list[Text]:
    shown = Terminal('kvasir run kvasir-mini "Once upon a time" --no-chat --temp 0 --seed 7 -n 60', 14, home)
    shown.wait_for_end()
    return shown.lines()


def chat(home: str) -> list[Text]:
    shown = Terminal("kvasir chat kvasir-mini --temp 0 --seed 7", 24, home)
    shown.wait_for("Send a message")
    shown.type("What is 23 + 45?\r")
    shown.wait_for("tokens")
    shown.type("Tell me a story about a fox.\r")
    shown.settle(3)
    shown.type("/show\r")
    shown.settle(2)
    return shown.lines()


def serve(home: str) -> list[Text]:
    shown = Terminal("kvasir serve kvasir-mini", 12, home)
    shown.wait_for("/v1")
    return shown.lines()


def bench(home: str) -> list[Text]:
    shown = Terminal("kvasir bench kvasir-mini --repeats 5", 24, home)
    shown.wait_for_end()
    return shown.lines()


def help_text(home: str) -> list[Text]:
    shown = Terminal("kvasir run --help", 400, home)
    shown.wait_for_end()
    lines = shown.lines()
    ends = [row for row, line in enumerate(lines) if line.plain.startswith("╰")]
    return lines[: ends[1] + 1]  # the arguments and the most common options


PICTURES: dict[str, Callable[[str], list[Text]]] = {
    "run": run,
    "chat": chat,
    "serve": serve,
    "bench": bench,
    "help": help_text,
}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as home:
            lines = PICTURES[name](home)
        print("\n".join(line.plain for line in lines))
        print(f"wrote {draw(name, 'kvasir', lines)}")


if __name__ == "__main__":
    main()
