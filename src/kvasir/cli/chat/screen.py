"""Terminal output of a chat: streamed answers, with thinking dimmed, and notes separate from them."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from kvasir.cli.chat.markdown import MarkdownView
from kvasir.cli.show import fitted, plain
from kvasir.environment import env

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.status import Status

    from kvasir.engine.front import Front

_TAIL = 16  # number of last prompt ids in which an opening tag is searched
OPEN, CLOSE = "<think>", "</think>"
_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"


class ThinkingView:
    """Splits a streamed answer into thinking and the rest; a tag may be divided anywhere.

    Thinking is the text at the start between <think> and </think>, including the tags. `inside`: the prompt opened it.
    """

    def __init__(self, inside: bool = False):
        self._state = "inside" if inside else "before"
        self._held = ""

    def push(self, text: str) -> list[tuple[str, bool]]:
        """The text that can be shown already: (text, whether it is thinking)."""
        text, self._held = self._held + text, ""
        if self._state == "before":
            begun = text.lstrip()
            if OPEN.startswith(begun):  # also if there are only spaces so far
                self._held = text
                return []
            self._state = "inside" if begun.startswith(OPEN) else "after"
        return self._inside(text) if self._state == "inside" else [(text, False)]

    def flush(self) -> list[tuple[str, bool]]:
        """The text held back, at the end of the answer."""
        text, self._held = self._held, ""
        return [(text, self._state == "inside")] if text else []

    def _inside(self, text: str) -> list[tuple[str, bool]]:
        thought, tag, rest = text.partition(CLOSE)
        if tag:
            self._state = "after"
            return [(thought + tag, True), (rest, False)]
        held = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        self._held = text[len(text) - held :]
        return [(text[: len(text) - held], True)]


async def thinking_of(front: Front, ids: Sequence[int]) -> ThinkingView:
    """For the answer to these prompt ids, which may end with an opening tag."""
    return ThinkingView(inside=(await front.decode(ids[-_TAIL:])).rstrip().endswith(OPEN))


class Screen:
    """Answers go to stdout unchanged; on a terminal their Markdown is rendered, thinking is dimmed and control
    characters are replaced. Notes and errors go to stderr. renders: whether Markdown is rendered on a terminal."""

    def __init__(self, renders: bool = True) -> None:
        self._terminal = sys.stdout.isatty()
        colour = not env("NO_COLOR")
        self._dims = self._terminal and colour
        self._dim_notes = sys.stderr.isatty() and colour
        self._view = MarkdownView(self._write, shutil.get_terminal_size, colour)
        self._thought = False  # whether the last text was thinking
        self._begun = False  # whether the answer proper has begun
        self.renders = renders and self._terminal and env("TERM") != "dumb"
        self._spinner: Status | None = None

    def begin_answer(self) -> None:
        """Shows a spinner until the first text of the answer, on a terminal."""
        if not (self.renders and self._dim_notes):
            return
        from rich.console import Console

        self._spinner = Console(stderr=True).status("")
        self._spinner.start()

    def _end_spinner(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def pieces(self, pieces: list[tuple[str, bool]]) -> None:
        for text, thinking in pieces:
            text = plain(text) if self._terminal else text
            if text:
                self._end_spinner()
            if thinking:
                self._thought = self._thought or bool(text)
                self._write(f"{_DIM}{text}{_NORMAL}" if self._dims and text else text)
            elif self.renders:
                self._render(text)
            else:
                self._write(text)

    def _render(self, text: str) -> None:
        if not self._begun and not (text := text.lstrip("\n")):
            return
        if self._thought and not self._begun:
            self._write("\n\n")
        self._begun = True
        self._view.push(text)

    def end_answer(self) -> None:
        self._end_spinner()
        if self._begun:
            self._view.flush()
        else:
            self._write("\n")
        self._thought = self._begun = False

    @staticmethod
    def _write(text: str) -> None:
        print(text, end="", flush=True)

    def note(self, text: str) -> None:
        text = fitted(plain(text), sys.stderr)
        print(f"{_DIM}{text}{_NORMAL}" if self._dim_notes else text, file=sys.stderr, flush=True)

    def error(self, error: Exception) -> None:
        message, hint = getattr(error, "message", str(error)), getattr(error, "hint", "")
        lines = [f"error: {plain(message)}", *([f"  try: {plain(hint)}"] if hint else [])]
        print(fitted("\n".join(lines), sys.stderr), file=sys.stderr, flush=True)
