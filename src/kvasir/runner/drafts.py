"""Samples along a draft: each position from its own logits, as a step of its own would.

Speculative decoding (Leviathan et al., ICML 2023) accepts drafted ids with a probability that keeps the target's
distribution. Here a drafted id is accepted exactly if the sampler draws it at its position. The draw is a function of
the logits, the ids before it, the seed and the position, so the results are the same as without drafts.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.plan import Work
from kvasir.runner.executor import Taken
from kvasir.runner.rows import Row

Draw = Callable[[int, int, bytes | None, bytes], Taken]


def along(work: Work, row: Row, mask: bytes | None, draw: Draw) -> Taken:
    """Samples after the last known id, and after each drafted id as long as the draft matches. mask: concatenated
    masks of equal length, one per position. draw(i, known, mask, carry): samples from the i-th of the work's last
    1 + drafted token rows, after the first `known` ids of the row.

    An error at a drafted id ends the draft before it: the next step meets the error again.
    """
    size = len(mask) // (work.drafted + 1) if mask is not None else 0
    tokens, entries, carry = [], [], row.carry
    for i in range(work.drafted + 1):
        known = row.known - work.drafted + i
        taken = draw(i, known, mask[i * size :][:size] if mask is not None else None, carry)
        if taken.error:
            if tokens:
                break
            return taken
        tokens += taken.tokens
        entries += taken.logprobs
        carry = taken.carry
        if known < row.known and row.ids[known] != tokens[-1]:
            break
    return Taken(tuple(tokens), tuple(entries), carry)
