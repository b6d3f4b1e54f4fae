"""The counts of a sequence: how many of its tokens exist, and how far steps have come.

known     0 ........................ prompt ........ sampled ......
computed  0 ................. c                                     once all planned steps are done
stored    0 ........ s                                              now
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Counts:
    """They advance when a step is planned, and are settled when it is committed.

    known:    tokens that exist or are being sampled by a step under way (values may lag)
    computed: tokens whose keys and values are in the cache once all planned steps are done
    stored:   those of them that are there now
    in_flight: steps under way that sample for it
    drafted: ids of it that the step under way checks; see drafts
    turn: the last step that was planned to compute some of it
    since: its last token's time by the scheduler's clock, before that the time when it came
    """

    known: int
    computed: int = 0
    stored: int = 0
    in_flight: int = 0
    drafted: int = 0
    turn: int = 0
    since: float = 0.0
