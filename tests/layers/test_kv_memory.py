"""Bytes of tensors, and the memory of a pool that an executor allocates in its own layout."""

import numpy as np
import pytest
import torch

from kvasir.caches import PagedKV, Window
from kvasir.layers.kv_cache import bytes_of, from_bytes
from kvasir.layers.kv_layout import KVLayout
from kvasir.layers.kv_memory import PagedMemory, joined

KIND, WINDOW = PagedKV(1, 2), Window(1, 2, window=8)


class Flat(PagedMemory):
    """One flat array per field, without the shape of a block."""

    def _allocate(self, bank, num_blocks):
        return [np.zeros((len(bank.layers), field.copies, num_blocks, 4), np.float32) for field in bank.fields]


def made(specs, num_blocks=(5, 5)) -> Flat:
    layout = KVLayout(specs)
    return Flat(layout, layout.cache_groups(lambda kind: 32), num_blocks[: len(layout.groups)], 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_bytes_of_a_tensor_and_back(dtype):
    tensor = torch.arange(-6, 6).view(3, 4).to(dtype)
    data = bytes_of(tensor)
    assert data.readonly and data.nbytes == tensor.nbytes
    back = from_bytes(data, dtype)
    assert torch.equal(back.view(3, 4), tensor)
    back.zero_()
    assert torch.equal(from_bytes(data, dtype).view(3, 4), tensor), "a copy"


def test_one_part_is_joined_without_a_copy():
    one, two = memoryview(b"ab"), memoryview(b"c")
    assert joined([one]) is one
    assert joined([one, two]) == b"abc"


def test_sizes_are_given_for_each_group():
    with pytest.raises(ValueError, match=r"1 .* 2"):
        made({"": (KIND, WINDOW)}, num_blocks=(5,))


def test_the_layout_of_a_block_is_left_to_the_executor():
    with pytest.raises(NotImplementedError):
        PagedMemory(KVLayout.of((KIND,)), KVLayout.of((KIND,)).cache_groups(lambda kind: 32), [5], 4)


def test_a_view_of_a_model_numbers_its_own_layers():
    memory = made({"target": (KIND, WINDOW), "draft": (WINDOW, KIND)})
    draft = memory.of("draft")
    draft.arrays(0)[0][:] = 7
    assert (memory.arrays(2)[0] == 7).all() and not memory.arrays(1)[0].any()
    assert draft.spec == (WINDOW, KIND) and memory.spec == (KIND, WINDOW, WINDOW, KIND)
    assert [draft.group_of(layer) for layer in range(2)] == [1, 0]


def test_blocks_are_copied_in_all_layers_of_their_group_only():
    memory = made({"": (KIND, WINDOW, KIND)})
    memory.fill_(1.0)
    for layer in range(3):
        memory.arrays(layer)[0][:, 2] = 5 + layer
    memory.copy(0, [(2, 3)])
    assert [memory.arrays(layer)[0][0, 3, 0].item() for layer in range(3)] == [5, 1, 7]


def test_blocks_that_swap_read_all_sources_first():
    memory = made({"": (KIND,)})
    for block in range(5):
        memory.arrays(0)[0][:, block] = block
    memory.copy(0, [(1, 2), (2, 1)])
    assert memory.arrays(0)[0][0, :, 0].tolist() == [0, 2, 1, 3, 4]
