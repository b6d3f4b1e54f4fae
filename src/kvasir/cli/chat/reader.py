"""Reads a chat's input: with prompt_toolkit on a terminal, else plain lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvasir.environment import env

PROMPT, MORE = "> ", ". "
QUOTES = '"""'  # begin and end a text of several lines

Reader = Callable[[], str]  # the next input, of one or more lines; raises EOFError and KeyboardInterrupt


def make_reader(words: Sequence[str]) -> Reader:
    """A reader for this process's stdin; the Tab key completes `words`."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: read_lines("", "")
    return _terminal_reader(words)


def read_lines(prompt: str, more: str) -> str:
    """A line from stdin, with the following lines as long as each ends with a backslash or a quoted text is open."""
    lines = [input(prompt)]
    while is_open("\n".join(lines)):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(input(more))
    return unquoted("\n".join(lines))


def is_open(text: str) -> bool:
    """Whether the input continues in the next line."""
    if text.lstrip().startswith(QUOTES):
        return text.count(QUOTES) < 2
    return text.endswith("\\")


def unquoted(text: str) -> str:
    """The text between the quotes that begin and end it, without the line breaks next to them; else the text itself."""
    inner = text.strip()
    if not (inner.startswith(QUOTES) and inner.endswith(QUOTES) and len(inner) >= 2 * len(QUOTES)):
        return text
    return inner[len(QUOTES) : -len(QUOTES)].removeprefix("\n").removesuffix("\n")


def _terminal_reader(words: Sequence[str]) -> Reader:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_file()
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(path)) if path else InMemoryHistory(),
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation=MORE,
        placeholder=FormattedText([("fg:ansibrightblack", "Send a message (/? for help)")]),
    )
    return lambda: unquoted(session.prompt(PROMPT))


def _keys():
    """Enter sends the input; after a backslash, within quotes or after Esc it begins a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event) -> None:
        buffer = event.current_buffer
        if not is_open(buffer.text):
            buffer.validate_and_handle()
            return
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
        buffer.insert_text("\n")

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
