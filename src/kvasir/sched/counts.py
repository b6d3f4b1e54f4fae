"""The counts of a sequence: how many of its tokens exist, and how many are computed.

known     0 ........................ prompt ........ sampled ......
computed  0 ................. c                                     once all planned steps are done
stored    0 ........ s                                              now
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Counts:
    """Counts advance when a step is planned, and are settled when it is committed.

    known:    tokens that exist or are being sampled by a pending step (values may lag)
    computed: tokens whose keys and values are in the cache once all planned steps are done
    stored:   tokens whose keys and values are in the cache now
    in_flight: pending steps that sample a token of the sequence
    drafted: drafted ids that the pending step checks; see drafts
    turn: the last step that was planned to compute the sequence
    since: time of its last token by the scheduler's clock; before its first token, its arrival
    """

    known: int
    computed: int = 0
    stored: int = 0
    in_flight: int = 0
    drafted: int = 0
    turn: int = 0
    since: float = 0.0
