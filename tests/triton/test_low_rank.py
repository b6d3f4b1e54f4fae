"""Low-rank adapters: against the reference, and the bits of a row alone and beside any others."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from typing import NamedTuple

import numpy as np
import torch

from kvasir.ops.linear import triton as linear
from kvasir.ops.linear import triton_low_rank as kernels
from tests.triton.test_linear import close, gated, inputs, joined, made, parts, whole

SLOT = 1  # of the first matrix in the tables
ADAPTERS = 6


class Adapter(NamedTuple):
    """Matrices by part, None for one that it leaves alone."""

    pairs: list[tuple[torch.Tensor, torch.Tensor] | None]


def adapter(seed, rank, cols, rows):
    """Random matrices. rows: of each part."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32))

    return Adapter([(normal(rank, cols) / cols**0.5, normal(n, rank) / rank**0.5) for n in rows])


def tables_of(adapters):
    """The tables of adapters by id, and what they point to."""
    tables, kept = torch.zeros(ADAPTERS, dtype=torch.int64), []
    for id, its in adapters.items():
        entries = torch.zeros(SLOT + len(its.pairs), kernels.ENTRY_FIELDS, dtype=torch.int64)
        for part, pair in enumerate(its.pairs):
            if pair is not None:
                a, b = pair
                entries[SLOT + part] = torch.tensor([a.data_ptr(), b.data_ptr(), len(a)])
        tables[id] = entries.data_ptr()
        kept.append((entries, its))
    return tables, kept


def delta_of(x, ids, adapters, rows, beside=True):
    """The deltas of all parts: [T, N] beside each other, or [parts, T, N]. Not written: NaN."""
    tables, kept = tables_of(adapters)
    adapters_T = torch.tensor(ids, dtype=torch.int32)
    segments, _ = kernels.split(x.shape[1])
    inner = torch.full((len(rows), segments, len(x), kernels.MAX_RANK), torch.nan)
    shape = (len(x), sum(rows)) if beside else (len(rows), len(x), rows[0])
    delta = torch.full(shape, torch.nan)
    kernels.shrink(x, adapters_T, tables, SLOT, inner)
    kernels.grow(inner, adapters_T, tables, SLOT, delta, rows)
    assert kept
    return linear.Delta(delta, adapters_T)


def exact(x, pair):
    a, b = pair
    return x.double() @ a.double().T @ b.double().T


def bits(tensor):
    return tensor.view(torch.int32)


@pytest.mark.parametrize("rank", [1, 16, 35, kernels.MAX_RANK])
def test_delta_is_b_times_a_x(rank):
    rows, x = [70], inputs(5, 100)
    its = adapter(0, rank, 100, rows)
    close(delta_of(x, [3] * 5, {3: its}, rows).values, exact(x, its.pairs[0]))


@pytest.mark.parametrize("cols", [1024, 1100])
def test_long_sums_are_split(cols):
    assert kernels.split(cols)[0] == 2
    its, x = adapter(0, 4, cols, [9]), inputs(3, cols)
    close(delta_of(x, [1] * 3, {1: its}, [9]).values, exact(x, its.pairs[0]))


@pytest.mark.parametrize(("cols", "segments"), [(64, 1), (2048, 4), (4096, 8), (14336, 16), (1 << 17, 16)])
def test_segments_are_whole_steps_and_cover_the_columns(cols, segments):
    count, width = kernels.split(cols)
    assert count == segments and width % 64 == 0 and (count - 1) * width < cols <= count * width


def test_inputs_may_be_rounded():
    its, x = adapter(0, 8, 64, [20]), inputs(4, 64).bfloat16()
    got = delta_of(x, [1] * 4, {1: its}, [20]).values
    assert torch.equal(got, delta_of(x.float(), [1] * 4, {1: its}, [20]).values)


def test_parts_lie_beside_each_other_or_apart():
    rows, x = [40, 9, 70], inputs(6, 64)
    its = adapter(0, 5, 64, rows)
    close(delta_of(x, [2] * 6, {2: its}, rows).values, torch.cat([exact(x, pair) for pair in its.pairs], 1))
    its = adapter(1, 5, 64, [40, 40])
    close(delta_of(x, [2] * 6, {2: its}, [40, 40], beside=False).values, torch.stack([exact(x, p) for p in its.pairs]))


@pytest.mark.parametrize(("cols", "count"), [(64, 70), (1024, 20)])
def test_a_row_has_the_same_bits_alone_and_beside_any_adapters(cols, count):
    rows, x = [70, 20], inputs(count, cols)
    adapters = {i: adapter(i, rank, cols, rows) for i, rank in ((1, 3), (2, 40), (3, 16), (5, 17))}
    ids = [(0, 1, 1, 2, 5, 3, 0, 2)[i * i % 8] for i in range(count)]
    x[ids.index(0)] = torch.nan
    batch = delta_of(x, ids, adapters, rows).values
    for t in (0, 1, 2, 3, 17, count - 1):
        mine = {id: its for id, its in adapters.items() if id == ids[t]} or adapters
        alone = delta_of(x[t : t + 1], ids[t : t + 1], mine, rows).values
        assert torch.equal(bits(alone), bits(batch[t : t + 1]))
    for first, last in ((1, 17), (9, 41)):
        some = delta_of(x[first:last], ids[first:last], adapters, rows).values
        assert torch.equal(bits(some), bits(batch[first:last]))


def test_matrices_of_other_adapters_are_not_read():
    rows, x = [20], inputs(4, 64)
    its, nan = adapter(1, 4, 64, rows), adapter(2, 30, 64, rows)
    for matrix in nan.pairs[0]:
        matrix.fill_(torch.nan)
    expected = delta_of(x[:3], [1, 1, 1], {1: its}, rows).values
    got = delta_of(x, [1, 1, 1, 2], {1: its, 2: nan}, rows).values
    assert torch.equal(got[:3], expected) and got[3].isnan().all()
    got = delta_of(x, [1, 0, 1, 0], {1: its, 2: nan}, rows).values
    assert got[1].isnan().all(), "a row without an adapter was written"
    assert torch.equal(got[::2], delta_of(x[::2], [1, 1], {1: its}, rows).values)


@pytest.mark.parametrize("id", [2, 4])
def test_a_slot_that_an_adapter_leaves_alone_gets_negative_zeros(id):
    """Adapter 2 changes the other part only; 4 is not there."""
    rows, x = [20, 20], inputs(3, 64)
    half = adapter(1, 4, 64, rows)
    half.pairs[0] = None
    got = delta_of(x, [id] * 3, {1: adapter(3, 2, 64, rows), 2: half}, rows).values
    assert (bits(got[:, :20]) == -(2**31)).all()
    assert (bits(got[:, 20:]) == -(2**31)).all() == (id == 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("segments", [1, 2, 4])
def test_products_add_it_to_rows_with_an_adapter(segments, dtype):
    weight, x = made(70, 256, dtype, segments), inputs(6, 256)
    its, bias = adapter(1, 4, 256, [70]), torch.arange(70).float()
    delta = delta_of(x, [1, 0, 1, 0, 2, 0], {1: its}, [70])
    plain, got = parts(x, weight), torch.full((segments, 6, 70), torch.nan)
    linear.product(x, weight, got, delta=delta)
    expected = plain.clone()
    expected[0, ::2] += delta.values[::2]
    assert torch.equal(bits(got), bits(expected))
    out = torch.full((6, 70), torch.nan)
    linear.whole_product(x, weight, out, bias, delta)
    assert torch.equal(bits(out), bits(joined(got) + bias))
    assert torch.equal(bits(out[1::2]), bits(whole(x, weight, bias)[1::2]))
    assert torch.equal(bits(out[4]), bits(whole(x, weight, bias)[4])), "an absent adapter changed a row"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gate_and_up_are_adapted_before_the_activation(dtype):
    gate, up, x = made(40, 96, dtype, seed=2), made(40, 96, dtype, seed=3), inputs(5, 96) / 4
    delta = delta_of(x, [1, 0, 1, 0, 0], {1: adapter(1, 4, 96, [40, 40])}, [40, 40], beside=False)
    out = torch.full((5, 40), torch.nan)
    linear.gated_product(x, gate, up, out, "relu", delta)
    both = [parts(x, weight)[0] + values for weight, values in zip((gate, up), delta.values, strict=True)]
    assert torch.equal(out[:3:2], (both[0].relu() * both[1])[:3:2])
    assert torch.equal(bits(out[[1, 3, 4]]), bits(gated(x, gate, up, "relu")[[1, 3, 4]]))


def test_shapes_are_checked():
    x, ids, tables = inputs(2, 64), torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="inner must be"):
        kernels.shrink(x, ids, tables, 0, torch.zeros(1, 2, 2, kernels.MAX_RANK))
    with pytest.raises(ValueError, match="2 matrices for 1 parts"):
        kernels.grow(torch.zeros(1, 1, 2, kernels.MAX_RANK), ids, tables, 0, torch.zeros(2, 8), [4, 4])
