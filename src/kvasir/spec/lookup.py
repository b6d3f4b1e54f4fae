"""Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding): what followed the last ids before follows them
again. Answers that edit, quote or summarise their prompt, or repeat themselves, are largely copies of earlier ids.

It keeps no state: one search of the ids' bytes, which takes microseconds, is cheaper than an index per sequence.
"""

from __future__ import annotations

from array import array

SHORTEST = 2  # ids that must match
LONGEST = 16  # beyond which a longer match says nothing more
WINDOW = 32768  # ids that are searched
CANDIDATES = 8  # of the places where the shortest suffix occurs, the most recent ones


def continuation(ids: array[int], most: int, source: array[int] | None = None) -> tuple[array[int], int]:
    """(at most `most` ids, and how many ids before them match the end of `ids`); no ids if the end occurs nowhere else.
    source: where to search, `ids` themselves if None.

    Of the recent places where the last ids occur, the one with the longest match is continued, ties by the most recent.
    Where its continuation reaches the end of `ids`, it continues with its own beginning, as copies do in LZ77.
    """
    text = ids if source is None else source
    begin = max(0, len(text) - WINDOW)
    data, width = text[begin:].tobytes(), text.itemsize
    tail = ids[-SHORTEST:].tobytes()
    found, longest, end = 0, 0, len(data) - width * (source is None)
    for _ in range(CANDIDATES if len(tail) == SHORTEST * width else 0):
        at = data.rfind(tail, 0, end)
        if at < 0:
            break
        end = at + len(tail) - 1
        if at % width == 0:
            after = begin + at // width + SHORTEST
            length = matching(ids, text, after)
            if length > longest:
                found, longest = after, length
    copied = text[found : found + most] if longest else array("i")
    if source is None and 0 < len(copied) < most:
        copied = (copied * (most // len(copied) + 1))[:most]
    return copied, longest if copied else 0


def matching(ids: array[int], text: array[int], after: int) -> int:
    """How many ids before `after` in a text equal those at the end of `ids`, from SHORTEST, which do, to LONGEST."""
    length, most = SHORTEST, min(LONGEST, after, len(ids))
    while length < most and text[after - 1 - length] == ids[-1 - length]:
        length += 1
    return length
