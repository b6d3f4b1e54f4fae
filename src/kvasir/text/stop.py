"""Stop strings in a stream of text.

A stream stops at the first character that completes any stop string. If the character completes several, the longest
counts, so that none of its text is shown. The rule looks at one character at a time, so the result does not depend on
how the text is divided into pieces.
"""

from collections.abc import Sequence

from kvasir.errors import InvalidRequest


class StopStrings:
    """Passes text on, holding back only the longest suffix that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False):
        """`include_stop` keeps the stop string in the text. Raises InvalidRequest for an empty stop string."""
        if "" in stops:
            raise InvalidRequest("a stop string is empty", "leave it out, or use max_tokens", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the stream; text pushed after it is dropped."""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to show, the stop string that ended the stream or None)."""
        if self.stopped is not None:
            return "", self.stopped
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, end = match
            self._held, self.stopped = "", text[start:end]
            return text[: end if self._include_stop else start], self.stopped
        keep = self._longest_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """The text held back, when the stream ends without a stop string."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """(start, end) of the match that ends first; among those, the match that starts first."""
        starts = ((text.find(stop), len(stop)) for stop in self._stops)
        matches = [(start + size, start) for start, size in starts if start >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return start, end

    def _longest_beginning(self, text: str) -> int:
        """The length of the longest suffix of `text` that is the beginning of a stop string."""
        for size in range(min(len(text), max(map(len, self._stops), default=1) - 1), 0, -1):
            ending = text[-size:]
            if any(stop.startswith(ending) for stop in self._stops):
                return size
        return 0
