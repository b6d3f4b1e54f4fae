"""What ranks have gathered, combined on the device: the results of `kvasir.parallel`."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch

from kvasir import parallel
from kvasir.ops.collective.triton import pick, side_by_side
from kvasir.parallel import cut


@pytest.mark.parametrize(("size", "parts"), [(300, 2), (300, 4), (300, 8), (40, 2), (128, 8)])
def test_rows_come_from_the_part_of_their_id(size, parts):
    table, everyones = cut(size, parts, 16), torch.randn(parts, size, 20)
    out = torch.full((size, 20), torch.nan)
    pick(everyones, torch.arange(size, dtype=torch.int32), out, table, 16)
    expected = parallel.picked([one.numpy() for one in everyones], torch.arange(size).numpy(), table)
    assert torch.equal(out, torch.from_numpy(expected))


@pytest.mark.parametrize(("size", "parts"), [(300, 2), (300, 8), (40, 2)])
def test_columns_of_unequal_parts(size, parts):
    columns, rows = cut(size, parts, 16), 5
    widths = [last - first for first, last in map(columns.range, range(parts))]
    mine, everyones = [torch.randn(rows, width) for width in widths], torch.full((parts, rows * max(widths)), torch.nan)
    for part, one in enumerate(mine):
        everyones[part, : one.numel()] = one.flatten()
    out = torch.full((rows, size), torch.nan)
    side_by_side(everyones, out, columns)
    assert torch.equal(out, torch.cat(mine, 1))
