"""The sizes in which the torch body of attention computes."""

from typing import Any

TILE = 64  # keys of a tile; tiles begin at multiples of it
# Maximum float32 values of keys, values, scores and partial results that the torch body computes together.
BUDGET = 1 << 22


def first_in_window(position: Any, window: int) -> Any:
    """The first key that the query at a position attends to. window: as in `CacheKind`. An array's elements may be
    negative where a window reaches before the text."""
    if window < 0:
        return position // -window * -window
    return position - window + 1 if window else position * 0
