import numpy as np

from kvasir.layers.rows import RowArrays


def test_empty_rows_are_zero_and_have_a_table_per_group():
    rows = RowArrays.empty(3, 10, 2, 4)
    assert rows.ids.shape == (3, 10) and rows.seconds.shape == (3,)
    assert [table.shape for table in rows.tables] == [(3, 4)] * 2
    assert (rows.ids.dtype, rows.seconds.dtype, rows.tables[0].dtype) == (np.int32,) * 3
    assert not any(array.any() for array in (rows.ids, rows.seconds, *rows.tables))


def test_tables_of_groups_share_no_memory():
    rows = RowArrays.empty(3, 10, 2, 4)
    rows.tables[0][:] = 7
    assert not rows.tables[1].any()
