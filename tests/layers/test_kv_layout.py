"""Which layers share a block table, and which share memory."""

import pytest

from kvasir.caches import PagedKV, Shared, State, Window
from kvasir.layers.kv_layout import KVLayout

FULL, WIDE, SMALL, LARGE = PagedKV(2, 8), PagedKV(4, 8), Window(2, 8, window=16), Window(2, 8, window=64)
STATE, RUNNING = State((2, 3), inputs=5, before=3), State((2, 3), inputs=5, before=3, running=True)


def test_a_layout_of_a_layout_is_itself():
    layout = KVLayout({"": (FULL,)})
    assert KVLayout.of(layout) is layout
    assert KVLayout.of((FULL, SMALL)).models == {"": range(2)}


def test_tables_are_shared_by_layers_of_equal_reach():
    layout = KVLayout.of((SMALL, FULL, LARGE, WIDE, STATE, SMALL))
    assert layout.groups == ((0, 5), (1, 3), (2,), (4,))
    assert [layout.group_of(layer) for layer in range(6)] == [0, 1, 2, 1, 3, 0]


def test_banks_are_layers_of_a_group_with_equal_fields():
    banks = KVLayout.of((FULL, WIDE, SMALL, FULL)).banks(16)
    assert [(bank.group, bank.layers, bank.kind) for bank in banks] == [
        (0, (0, 3), FULL),
        (0, (1,), WIDE),
        (1, (2,), SMALL),
    ]
    assert all(bank.fields == bank.kind.fields(16) for bank in banks)


def test_states_with_and_without_rows_share_no_bank():
    layout = KVLayout.of((STATE, RUNNING, STATE))
    assert layout.groups == ((0, 1, 2),)
    assert [bank.layers for bank in layout.banks(16)] == [(0, 2), (1,)]
    assert layout.row_bytes == RUNNING.row_bytes == 4 * 6


def test_bytes_of_a_block_are_the_sum_over_the_layers_of_its_group():
    groups = KVLayout.of((FULL, SMALL, WIDE)).cache_groups(lambda kind: kind.heads)
    assert [(group.kind, group.layers, group.bytes_per_block) for group in groups] == [
        (FULL, (0, 2), 6),
        (SMALL, (1,), 2),
    ]


def test_a_layer_that_shares_has_the_kind_and_group_of_its_owner():
    layout = KVLayout({"target": (SMALL, FULL), "draft": (FULL, Shared(0, "target"), Shared(0))})
    assert layout.models == {"target": range(2), "draft": range(2, 5)}
    assert layout.owners == (0, 1, 2, 0, 2)
    assert layout.kinds == (SMALL, FULL, FULL, SMALL, FULL)
    assert layout.groups == ((0,), (1, 2)) and layout.group_of(3) == 0
    assert sum(len(bank.layers) for bank in layout.banks(16)) == 3


@pytest.mark.parametrize(("layer", "model"), [(1, "target"), (-1, "target"), (0, "other")])
def test_a_shared_layer_that_does_not_exist_is_named(layer, model):
    with pytest.raises(ValueError, match=f"{layer} of '{model}'"):
        KVLayout({"target": (FULL,), "draft": (Shared(layer, model),)})
