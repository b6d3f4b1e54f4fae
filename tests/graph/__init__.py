"""The graph executor in Triton's interpreter: it proves indexing and scheduling, not the order of sums on a GPU, which
tests/compiled and tests/gpu do."""
