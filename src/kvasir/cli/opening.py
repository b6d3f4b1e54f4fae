"""What a server shows of its start: a spinner, then one line and the warnings, or all that its engines decided."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvasir.cli.waiting import decided, loading, progress_of, spinner

if TYPE_CHECKING:
    from kvasir.engine.progress import Progress
    from kvasir.serve.server import Opening


class ShownStart:
    """To be entered before an engine is launched, and called when the server is ready.

    progress: shows how far the load is; None if standard error is no terminal.
    """

    def __init__(self, name: str, verbose: bool):
        self.progress: Progress | None = None
        self._name, self._verbose = name, verbose
        self._stack = ExitStack()

    def __enter__(self) -> ShownStart:
        if status := self._stack.enter_context(spinner(loading(self._name))):
            self.progress = progress_of(self._name, status)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self, opening: Opening) -> None:
        self.show(opening.line, opening.decisions)

    def show(self, line: str, decisions: tuple[str, ...]) -> None:
        """Ends the spinner and prints."""
        self._stack.close()
        print("\n".join((line, *decided(decisions, self._verbose))), flush=True)
