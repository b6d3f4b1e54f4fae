"""Products with weights on the device: against torch, and the bits of a row alone and in any batch."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import ml_dtypes
import numpy as np
import torch

from kvasir.ops import activation
from kvasir.ops.linear import triton as linear
from kvasir.ops.linear.triton_matrix import launch_parts, most_segments

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def put(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def made(rows, cols, dtype="bfloat16", segments=1, seed=0):
    values = np.random.default_rng(seed).normal(size=(rows, cols)).astype(np.float32)
    return linear.matrix_from_floats(values, dtype, segments, put)


def inputs(count, cols, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, cols)).astype(np.float32))


def parts(x, weight, bias=None, count=0):
    out = torch.full((count or weight.segments, len(x), weight.rows), torch.nan)
    linear.product(x, weight, out, bias)
    return out


def joined(parts):
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


def whole(x, weight, bias=None, dtype=torch.float32):
    out = torch.full((len(x), weight.rows), torch.nan, dtype=dtype)
    linear.whole_product(x, weight, out, bias)
    return out


def gated(x, gate, up, act="silu", dtype=torch.float32):
    out = torch.full((len(x), gate.rows), torch.nan, dtype=dtype)
    linear.gated_product(x, gate, up, out, act)
    return out


def exact(x, weight):
    return x.to(DTYPES[weight.dtype]).double() @ weight.data.double().T


def close(got, expected):
    assert (got.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(70, 64), (3, 100), (64, 33)])
def test_a_product_is_the_sum_over_the_columns(dtype, rows, cols):
    weight, x = made(rows, cols, dtype), inputs(5, cols)
    bias = torch.arange(rows).float()
    close(parts(x, weight)[0], exact(x, weight))
    close(parts(x.to(DTYPES[dtype]), weight, bias)[0], exact(x, weight) + bias)


@pytest.mark.parametrize("segments", [2, 8])
def test_parts_are_the_sums_of_the_segments(segments):
    weight, x = made(20, 128, segments=segments), inputs(3, 128)
    for s, part in enumerate(parts(x, weight)):
        columns = slice(s * 128 // segments, (s + 1) * 128 // segments)
        close(part, x[:, columns].bfloat16().double() @ weight.data[:, columns].double().T)


def test_a_bias_is_refused_before_segments_are_joined():
    with pytest.raises(ValueError, match="joined"):
        parts(inputs(1, 64), made(4, 64, segments=2), torch.zeros(4))


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_a_whole_product_has_the_bits_of_joined_parts(segments):
    weight, x = made(70, 256, segments=segments), inputs(20, 256)
    bias = torch.arange(70).float()
    expected = joined(parts(x, weight))
    assert torch.equal(whole(x, weight), expected)
    assert torch.equal(whole(x, weight, bias, torch.bfloat16), (expected + bias).bfloat16())


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_parts_of_several_segments_continue_the_tree(count):
    weight, x = made(70, 256, segments=8), inputs(3, 256)
    assert torch.equal(joined(parts(x, weight, count=count)), whole(x, weight))


def test_ranks_have_the_segments_of_the_whole():
    """Each rank's columns are some of the segments, and the tree over their sums is that of one rank."""
    weight, x = made(20, 256, segments=8), inputs(3, 256)
    expected = whole(x, weight)
    for ranks in (2, 4, 8):
        width = 256 // ranks
        shards = [
            linear.matrix_from_floats(weight.data[:, r * width : (r + 1) * width].float(), "bfloat16", 8 // ranks, put)
            for r in range(ranks)
        ]
        sums = [whole(x[:, r * width : (r + 1) * width], shard) for r, shard in enumerate(shards)]
        assert torch.equal(joined(torch.stack(sums)), expected)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_product_is_the_activated_gate_times_up(act):
    gate, up, x = made(40, 96, seed=2), made(40, 96, seed=3), inputs(4, 96) / 4
    expected = getattr(activation, act)(exact(x, gate).float()).double() * exact(x, up)
    got = gated(x, gate, up, act)
    close(got, expected)
    assert torch.equal(gated(x, gate, up, act, torch.bfloat16), got.bfloat16())


def test_gate_and_up_must_match():
    with pytest.raises(ValueError, match="one shape"):
        gated(inputs(1, 64), made(4, 64), made(8, 64))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype):
    weight, up, x = made(70, 96, dtype, 2), made(70, 96, dtype), inputs(130, 96)
    x[1] = torch.nan  # rows do not touch each other
    batch, joint, both = parts(x, weight), whole(x, weight), gated(x, up, up)
    for first, last in [(0, 1), (2, 18), (100, 130), (40, 104)]:
        assert torch.equal(parts(x[first:last], weight), batch[:, first:last])
        assert torch.equal(whole(x[first:last], weight), joint[first:last])
        assert torch.equal(gated(x[first:last], up, up), both[first:last])


def test_rows_may_be_part_of_wider_ones():
    weight, x = made(8, 64), inputs(3, 96)
    assert torch.equal(parts(x[:, 16:80], weight), parts(x[:, 16:80].contiguous(), weight))


def test_stacked_matrices_give_the_outputs_of_each():
    q, k, x = made(40, 64), made(9, 64, seed=5), inputs(2, 64)
    both = linear.stacked([q, k])
    assert both.shape == (49, 64)
    assert both.nbytes == q.nbytes + k.nbytes
    assert torch.equal(parts(x, both), torch.cat([parts(x, q), parts(x, k)], 2))
    with pytest.raises(ValueError, match="stacked"):
        linear.stacked([q, made(9, 96)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_come_from_arrays_and_tensors(dtype):
    values = inputs(4, 32)
    expected = values.to(DTYPES[dtype])
    for source in (values, values.numpy(), expected):
        assert torch.equal(linear.matrix_from_floats(source, dtype, 1, put).data, expected)


@pytest.mark.parametrize(
    ("rows", "cols", "group", "reduces", "segments"),
    [
        (4096, 4096, 1, True, 4),
        (4096, 14336, 32, True, 4),
        (1024, 3072, 1, True, 8),
        (896, 4864, 1, True, 4),
        (152064, 4096, 1, True, 1),
        (4096, 4096, 1, False, 1),
        (64, 64, 1, True, 2),
        (64, 50, 1, True, 1),
        (4096, 14336, 256, True, 4),
    ],
)
def test_segments_fill_the_device_with_whole_steps(rows, cols, group, reduces, segments):
    assert linear.choose_segments(rows, cols, group, reduces) == segments


def test_few_programs_join_several_segments_of_large_matrices():
    assert [most_segments(cols, 1) for cols in (16, 64, 256, 512, 28672)] == [1, 2, 8, 2, 8]
    assert [launch_parts(rows, 8) for rows in (64, 4096, 8192, 16384)] == [8, 4, 2, 1]
    assert [launch_parts(rows, 2) for rows in (64, 8192, 16384)] == [2, 2, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_over_the_columns_do_not_depend_on_the_rows(dtype):
    weight = made(1000, 64, dtype)
    assert len({linear.tiles(weight, 1 << n).block_k for n in range(13)}) == 1
