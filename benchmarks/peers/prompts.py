"""The prompts of a round, and the figure that is compared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from benchmarks.peers.places import PeerError
from benchmarks.peers.rows import Row


def prompts_of(row: Row, number: int, vocab_size: int) -> list[list[int]]:
    """Random ids: the same for every engine, different in each round unless the row keeps them."""
    random = np.random.default_rng((0, row.users, row.prompt, 0 if row.kept else number))
    return random.integers(0, vocab_size, (row.users, row.prompt)).tolist()


def value_of(row: Row, figures: Mapping[str, float], new: int) -> float:
    """The figure that is compared, for `new` tokens per prompt. Raises PeerError if the engine does not report it."""
    match row.figure:
        case "decode" | "sampling":
            return figures["decode_tokens"] / figures["decode_s"]
        case "prefill":
            return row.users * row.prompt / figures["first_s"]
        case "embed":
            return row.users / figures["total_s"]
        case "total":
            return row.users * new / figures["total_s"]
        case "http":
            return figures["tokens_per_s"]
    if "kernel_seconds" not in figures:
        raise PeerError("the engine does not report the time of its kernels")
    return 1 - figures["kernel_seconds"] / figures["step_seconds"]
