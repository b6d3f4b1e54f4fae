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


def continuation(ids: array[int], most: int) -> tuple[array[int], int]:
    """(at most `most` ids, and how many ids before them match the end of `ids`); no ids if the end occurs nowhere else.

    Of the recent places where the last ids occur, the one with the longest match is continued, ties by the most recent.
    Where its continuation reaches the end of `ids`, it goes on with its own beginning, as copies do in LZ77.
    """
    begin = max(0, len(ids) - WINDOW)
    data, width = ids[begin:].tobytes(), ids.itemsize
    tail = data[-SHORTEST * width :]
    found, longest, end = 0, 0, len(data) - width
    for _ in range(CANDIDATES if len(tail) == SHORTEST * width else 0):
        at = data.rfind(tail, 0, end)
        if at < 0:
            break
        end = at + len(tail) - 1
        if at % width == 0:
            after = begin + at // width + SHORTEST
            length = _matching(ids, after)
            if length > longest:
                found, longest = after, length
    if not longest:
        return array("i"), 0
    source = ids[found:]
    return array("i", (source[i % len(source)] for i in range(most))), longest


def _matching(ids: array[int], after: int) -> int:
    """How many ids before `after` equal those at the end, at most LONGEST."""
    length = SHORTEST
    while length < min(LONGEST, after) and ids[after - 1 - length] == ids[-1 - length]:
        length += 1
    return length
