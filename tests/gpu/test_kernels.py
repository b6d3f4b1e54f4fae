"""Tests of tests/triton again, with compiled kernels: those that compare bits, and one of each format's values. The
kernels run with copies of the host's tensors."""

from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the extra gpu is not installed")

from tests.gpu.places import DRY, MARKS, kernels_on_gpu  # noqa: E402

pytestmark = MARKS
AGAIN = {
    "attention": (
        "test_bits_do_not_depend_on_chunks_or_on_the_batch",
        "test_split_tiles_have_the_bits_of_whole_ones",
        "test_nan_of_one_sequence_does_not_reach_another",
        "test_sixteen_bit_values",
    ),
    "formats": (
        "test_a_whole_product_has_the_bits_of_joined_parts",
        "test_a_row_has_the_same_bits_alone_and_in_any_batch",
        "test_a_table_holds_the_values_of_the_file",
    ),
    "embedding": ("test_ids_outside_the_table_may_give_its_first_row",),
    "heads": ("test_the_dimensions_of_both_lie_side_by_side",),
    "linear": (
        "test_a_whole_product_has_the_bits_of_joined_parts",
        "test_a_row_has_the_same_bits_alone_and_in_any_batch",
        "test_a_gated_product_is_the_activated_gate_times_up",
    ),
    "moe": (
        "test_bits_of_a_row_do_not_depend_on_the_batch",
        "test_rows_of_other_experts_do_not_see_nan",
        "test_weights_are_multiplied_by_the_scales_of_their_experts",
        "test_sum_over_experts_is_in_ascending_id",
    ),
    "norm": (
        "test_bits_of_a_row_do_not_depend_on_the_batch",
        "test_output_is_rounded_to_nearest_even",
        "test_groups_have_weights_of_their_own",
        "test_norm_without_weights",
    ),
    "rope": ("test_bits_of_a_token_do_not_depend_on_the_batch", "test_values_are_rounded_to_nearest_even"),
}
for _file, _names in AGAIN.items():
    _module = importlib.import_module(f"tests.triton.test_{_file}")
    for _name in _names:
        globals()[f"{_name}__{_file}"] = getattr(_module, _name)


@pytest.fixture(autouse=True)
def compiled():
    if DRY:
        yield
        return
    with kernels_on_gpu():
        yield


@pytest.mark.parametrize("vocab", [160 if DRY else 151936])
@pytest.mark.parametrize("kind", ["normal", "flat", "steep", "infinite"])
def test_sampled_ids_and_log_probabilities_have_the_bits_of_the_reference(kind, vocab):
    from kvasir.plan import SamplingSpec
    from kvasir.sampling.device_layout import TILE
    from tests.sampling.test_native import row_context
    from tests.triton.test_sampler import logits, same

    specs = [
        SamplingSpec(logprobs=5),
        SamplingSpec(temperature=1.0, seed=7, logprobs=0),
        SamplingSpec(temperature=0.8, top_k=50, top_p=0.9, seed=2**63, logprobs=3),
        SamplingSpec(temperature=1.3, min_p=0.02, presence_penalty=0.4, repetition_penalty=1.2, seed=3),
        SamplingSpec(temperature=0.7, top_p=0.999, logit_bias=((3, 4.0), (7, -50.0)), seed=11),
    ]
    ids = [i % vocab for i in range(0, 40 * 31, 31)]
    contexts = [row_context(vocab, spec, ids, 10, None, b"") for spec in specs]
    same(logits(kind, vocab, len(specs)), contexts, tile=TILE)


def test_copies_share_memory_as_the_tensors_do():
    from tests.gpu.places import Moved

    move, whole = Moved("cpu"), torch.arange(12, dtype=torch.float32)
    part, other = move(whole.view(3, 4)[1:, ::2]), move(whole.view(torch.int32)[2:])
    assert torch.equal(part, whole.view(3, 4)[1:, ::2]) and part.data_ptr() != whole.data_ptr()
    part.fill_(-1.0)
    assert other[2] == torch.tensor(-1.0).view(torch.int32) and whole[4] == 4.0
    move.back()
    assert whole.tolist() == [0, 1, 2, 3, -1, 5, -1, 7, -1, 9, -1, 11]
    assert move(3) == 3 and move(None) is None
