"""Samples along a draft: each position from its own logits, as a step of its own would.

Speculative decoding (Leviathan et al., ICML 2023) accepts drafted ids with a probability that keeps the target's
distribution. Here a drafted id is accepted exactly if the sampler draws it at its position. The draw is a function of
the logits, the ids before it, the seed and the position, so the results are the same as without drafts.

A position's ids include the drafted ones before it, so all positions can be sampled at once; what follows the first
mismatch is dropped. Only a sampler with a carry must sample them one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvasir.plan import Work, unpack_ids
from kvasir.runner.executor import Taken
from kvasir.runner.rows import Row

Draw = Callable[[int, int, bytes | None, bytes], Taken]


def accepted(work: Work, found: Iterable[Taken]) -> Taken:
    """What a work has sampled. found: results after the last known id and after each drafted id, of which no more are
    taken than up to the first mismatch.

    An error at a drafted id ends the draft before it: the next step meets the error again.
    """
    tokens, entries, carry, draft = [], [], b"", draft_of(work)
    for i, taken in enumerate(found):
        if taken.error and tokens:
            break
        if taken.error or not draft:
            return taken
        tokens += taken.tokens
        entries += taken.logprobs
        carry = taken.carry
        if i < len(draft) and draft[i] != tokens[-1]:
            break
    return Taken(tuple(tokens), tuple(entries), carry)


def along(work: Work, row: Row, mask: bytes | None, draw: Draw) -> Taken:
    """Samples one position after another, as long as the draft matches. mask: see `masks_of`. draw(i, known, mask,
    carry): samples from the i-th of the work's last 1 + drafted token rows, after the first `known` ids of the row."""

    def found() -> Iterator[Taken]:
        carry = row.carry
        for i, one in enumerate(masks_of(work, mask)):
            taken = draw(i, work.end - work.drafted + i, one, carry)
            yield taken
            carry = taken.carry

    return accepted(work, found())


def draft_of(work: Work) -> list[int]:
    """The drafted ids of a work."""
    return unpack_ids(work.appended)[-work.drafted :] if work.drafted else []


def masks_of(work: Work, mask: bytes | None) -> list[bytes | None]:
    """The mask of each position. mask: theirs, concatenated, of equal length; None for none."""
    if mask is None:
        return [None] * (1 + work.drafted)
    size = len(mask) // (1 + work.drafted)
    return [mask[i * size : (i + 1) * size] for i in range(1 + work.drafted)]
