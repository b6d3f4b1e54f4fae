"""Terminal output of a chat: streamed answers, with thinking dimmed, and notes separate from them."""

from __future__ import annotations

import sys

from kvasir.cli.show import plain
from kvasir.environment import env

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


class Screen:
    """Answers go to stdout unchanged; on a terminal control characters are replaced and thinking is dimmed. Notes and
    errors go to stderr."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._dims = self._terminal and not env("NO_COLOR")
        self._dim_notes = sys.stderr.isatty() and not env("NO_COLOR")

    def pieces(self, pieces: list[tuple[str, bool]]) -> None:
        for text, thinking in pieces:
            text = plain(text) if self._terminal else text
            print(f"{_DIM}{text}{_NORMAL}" if thinking and self._dims and text else text, end="", flush=True)

    def end_answer(self) -> None:
        print(flush=True)

    def note(self, text: str) -> None:
        text = plain(text)
        print(f"{_DIM}{text}{_NORMAL}" if self._dim_notes else text, file=sys.stderr, flush=True)

    def error(self, error: Exception) -> None:
        message, hint = getattr(error, "message", str(error)), getattr(error, "hint", "")
        print(f"error: {plain(message)}", file=sys.stderr, flush=True)
        if hint:
            print(f"  try: {plain(hint)}", file=sys.stderr, flush=True)
