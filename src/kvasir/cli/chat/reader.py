"""Reads a chat's input: with prompt_toolkit on a terminal if it is installed, else plain lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvasir.environment import env

PROMPT, MORE = "> ", ". "

Reader = Callable[[], str]  # the next input, of one or more lines; raises EOFError and KeyboardInterrupt


def make_reader(words: Sequence[str]) -> Reader:
    """A reader for this process's stdin; the Tab key completes `words`."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: read_lines("", "")
    try:
        return _rich_reader(words)
    except ImportError:
        return lambda: read_lines(PROMPT, MORE)


def read_lines(prompt: str, more: str) -> str:
    """A line from stdin, with the following lines as long as each ends with a backslash."""
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(more))
    return "\n".join(lines)


def _rich_reader(words: Sequence[str]) -> Reader:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_file()
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(path)) if path else InMemoryHistory(),
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation=MORE,
    )
    return lambda: session.prompt(PROMPT)


def _keys():
    """Enter sends the input; after a backslash or Esc it begins a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def history_file() -> Path | None:
    """The file with the input history, readable only by this user; None if it cannot be written."""
    try:
        base = Path(env("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = base / "kvasir" / "chat_history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        return path
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
