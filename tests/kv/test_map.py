"""The map of blocks: every block's owner by definition, and a shorter map that keeps the commonest states."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvasir.kv.map import block_cells, run_lengths, shrink

TOTAL = 12
BLOCKS = st.sets(st.integers(1, TOTAL))


@given(st.lists(BLOCKS, max_size=4), BLOCKS, BLOCKS)
def test_each_block_shows_its_owner_and_whether_it_is_cached(tables, pins, cached):
    flags = [int(block in cached) for block in range(TOTAL + 1)]
    rows = [(7 + i, sorted(ids)) for i, ids in enumerate(tables)]
    cells = block_cells(flags, pins, rows)
    assert len(cells) == TOTAL
    for block, cell in enumerate(cells, 1):
        owners = [row for row, ids in rows if block in ids]
        expected = 3 + owners[0] if len(owners) == 1 else 2 if owners else int(block in pins)
        assert divmod(cell, 2) == (expected, block in cached)


CELLS = st.lists(st.integers(0, 5), min_size=1, max_size=60)


@given(CELLS, st.integers(1, 20))
def test_a_shorter_map_has_the_commonest_state_of_each_piece(cells, most):
    per_cell, short = shrink(cells, most)
    assert len(short) <= most and len(short) == -(-len(cells) // per_cell)
    assert per_cell == 1 or -(-len(cells) // (per_cell - 1)) > most
    for i, cell in enumerate(short):
        counts = Counter(cells[i * per_cell : (i + 1) * per_cell])
        assert counts[cell] == max(counts.values())


@given(CELLS)
def test_run_lengths_are_the_cells(cells):
    runs = run_lengths(cells)
    assert [c for c, n in zip(runs[::2], runs[1::2], strict=True) for _ in range(n)] == cells
    assert all(a != b for a, b in zip(runs[::2], runs[2::2], strict=False))
