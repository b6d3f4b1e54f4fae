"""Board: notes that the clients of an engine's host leave for each other."""

from __future__ import annotations

from collections.abc import Callable

MAX_NOTE = 1 << 20  # bytes


class Board:
    """Keeps the latest note of each client, and passes it on to the others that leave notes. What a note means is their
    business."""

    def __init__(self) -> None:
        self._notes: dict[Callable[[bytes], None], bytes] = {}

    def leave_note(self, take: Callable[[bytes], None], note: bytes) -> None:
        """take: of the client, which gets the notes of the others: at its first note all that there are, then each new
        one."""
        if take not in self._notes:
            for other in self._notes.values():
                take(other)
        self._notes[take] = note
        for other in [*self._notes]:
            if other != take:
                other(note)

    def leave(self, take: Callable[[bytes], None]) -> None:
        """Forgets a client, if it is known."""
        self._notes.pop(take, None)
