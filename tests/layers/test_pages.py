"""Arrays in separate pages."""

import numpy as np

from kvasir.layers.pages import paged


def test_a_table_begins_at_a_page_and_holds_what_is_written():
    table = paged((3, 5000), np.float32)
    assert table.ctypes.data % 4096 == 0 and not table.any()
    table[1] = 7
    assert table.shape == (3, 5000) and table[1].sum() == 35000 and not table[[0, 2]].any()


def test_a_table_without_rows_has_its_shape():
    assert paged((0, 4), np.uint16).shape == (0, 4)
