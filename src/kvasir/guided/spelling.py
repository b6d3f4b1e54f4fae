"""Spells a text by the bytes of tokens alone, for texts that the tokenizer itself does not reproduce."""

from __future__ import annotations

from collections.abc import Collection, Sequence

MOST_BYTES = 32  # longer tokens are not used


class Pieces:
    """The tokens of a vocabulary by their bytes; of equal tokens the lowest id."""

    def __init__(self, tokens: Sequence[bytes], without: Collection[int] = ()):
        """tokens: bytes by id, b"" for none. without: ids that spell no text."""
        excluded = frozenset(without)
        self._ids: dict[bytes, int] = {}
        for i, data in enumerate(tokens):
            if data and len(data) <= MOST_BYTES and i not in excluded:
                self._ids.setdefault(data, i)
        self._longest = max(map(len, self._ids), default=0)

    def spell(self, data: bytes) -> list[int] | None:
        """The fewest tokens that give these bytes, longer ones first; None if none do."""
        fewest: list[int | None] = [None] * len(data) + [0]  # tokens from each position on
        sizes = [0] * len(data)
        for at in range(len(data) - 1, -1, -1):
            for size in range(min(self._longest, len(data) - at), 0, -1):
                rest, so_far = fewest[at + size], fewest[at]
                if rest is None or (so_far is not None and so_far <= rest + 1) or data[at : at + size] not in self._ids:
                    continue
                fewest[at], sizes[at] = rest + 1, size
        if fewest[0] is None:
            return None
        ids, at = [], 0
        while at < len(data):
            ids.append(self._ids[data[at : at + sizes[at]]])
            at += sizes[at]
        return ids
