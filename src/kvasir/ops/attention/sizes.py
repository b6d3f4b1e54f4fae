"""The sizes in which the torch body of attention computes."""

TILE = 64  # keys of a tile; tiles begin at multiples of it
# Maximum float32 values of keys, values, scores and partial results that the torch body computes together.
BUDGET = 1 << 22
