"""What all products with packed matrices have in common."""

import numpy as np

from kvasir.ops import native as door
from kvasir.ops.linear import native
from kvasir.ops.linear.packed import PackedMatrix
from tests.isas import isas, shapes

from .test_native import bits

ISAS, SHAPES = isas(), shapes()


def assert_only_the_row_counts(
    packed: PackedMatrix, x: np.ndarray, bias: np.ndarray, residual: np.ndarray, seed: int
) -> None:
    """The bits of a row are the same on all instruction sets, in every tile, alone, among others and by parts of
    the panels."""
    random, (rows, outputs) = np.random.default_rng(seed), residual.shape
    door.force_isa("portable")
    expected = bits(native.product(packed, x, bias, residual))
    for isa, tile_panels in SHAPES:
        door.force_isa(isa)
        door.lib().kvasir_set_tile_panels(tile_panels)
        assert np.array_equal(bits(native.product(packed, x, bias, residual)), expected), (isa, tile_panels)
        row = int(random.integers(rows))
        alone = native.product(packed, x[row : row + 1], bias, residual[row : row + 1].copy())
        assert np.array_equal(bits(alone), expected[row : row + 1]), isa
        # Some rows, by parts of the panels, over the residual itself.
        first = int(random.integers(rows))
        out = residual[first:].copy()
        activated = native.prepare(packed, x[first:])
        panels = -(-outputs // native.PANEL)
        cut = int(random.integers(panels + 1))
        native.linear(packed, activated, out, bias, out, (cut, panels))
        native.linear(packed, activated, out, bias, out, (0, cut))
        assert np.array_equal(bits(out), expected[first:]), isa
