"""What adapters change in products: against the reference, and the bits of a row alone and beside any others."""

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from typing import Any, NamedTuple

import numpy as np
import torch

from kvasir.ops.linear import triton as linear
from kvasir.ops.linear import triton_in_effect as effects
from kvasir.ops.linear import triton_low_rank as kernels
from tests.triton.test_linear import close, gated, inputs, joined, made, parts, whole

PLACE = 1  # of the first matrix in the tables
ADAPTERS = 6


class Adapter(NamedTuple):
    """Matrices by part, None for one that it leaves alone. more: other fields of entries, by part."""

    pairs: list[tuple[torch.Tensor, torch.Tensor] | None]
    more: tuple[dict[int, torch.Tensor], ...] = ()


def normal(rng, *shape):
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32))


def adapter(seed, rank, cols, rows, *more):
    """Random matrices. rows: of each part."""
    rng = np.random.default_rng(seed)
    return Adapter([(normal(rng, rank, cols) / cols**0.5, normal(rng, n, rank) / rank**0.5) for n in rows], more)


def tables_of(adapters):
    """The tables of adapters by id, and what they point to."""
    tables, kept = torch.zeros(ADAPTERS, effects.TABLE_FIELDS, dtype=torch.int64), []
    for id, its in adapters.items():
        entries = torch.zeros(PLACE + len(its.pairs), effects.ENTRY_FIELDS, dtype=torch.int64)
        for part, pair in enumerate(its.pairs):
            if pair is not None:
                a, b = pair
                entries[PLACE + part, :3] = torch.tensor([a.data_ptr(), b.data_ptr(), len(a)])
        for part, fields in enumerate(its.more):
            for field, values in fields.items():
                entries[PLACE + part, field] = values.data_ptr()
        scales = any({effects.FACTOR, effects.ROWS} & set(fields) for fields in its.more)
        tables[id] = torch.tensor([entries.data_ptr(), effects.SCALES if scales else 0])
        kept.append((entries, its))
    return tables, kept


def effect_of(ids, tables):
    """ids: of each row, one id or several, or (id, scale)."""
    lists: list[Any] = [one if isinstance(one, list) else [one] if one else [] for one in ids]
    pairs = [[one if isinstance(one, tuple) else (one, 1.0) for one in row] for row in lists]
    adapters_TL = torch.zeros(len(ids), effects.LEVELS, dtype=torch.int32)
    scales_TL = torch.full((len(ids), effects.LEVELS), torch.nan)
    applied_T = torch.tensor([len(row) for row in pairs], dtype=torch.int32)
    for t, row in enumerate(pairs):
        for level, (id, scale) in enumerate(row):
            adapters_TL[t, level], scales_TL[t, level] = id, scale
            applied_T[t] |= int(tables[id, 1])
    return effects.InEffect(adapters_TL, scales_TL, applied_T)


def delta_of(x, ids, adapters, rows, beside=True, dtype="float32"):
    """The deltas of all parts: [T, N] beside each other, or [parts, T, N]. Not written: NaN."""
    tables, kept = tables_of(adapters)
    effect = effect_of(ids, tables)
    segments, _ = kernels.split(x.shape[1])
    inner = torch.full((len(rows), segments, effects.LEVELS, len(x), kernels.MAX_RANK), torch.nan)
    shape = (len(x), sum(rows)) if beside else (len(rows), len(x), rows[0])
    delta, factors = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    kernels.shrink(x, effect, tables, PLACE, inner)
    kernels.grow(x, inner, effect, tables, PLACE, delta, factors, rows, dtype)
    assert kept
    return linear.Delta(delta, factors, effect.applied_T)


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


def changed(y, x, its, scale=1.0):
    """The reference of what one adapter does to the product of the first matrix, in float64."""
    fields = its.more[0] if its.more else {}
    if its.pairs[0] is not None:
        y = y + scale * exact(x, its.pairs[0])
    y = y + scale * fields[effects.BIAS].double() if effects.BIAS in fields else y
    return y * fields[effects.FACTOR].double() if effects.FACTOR in fields else y


def test_adapters_of_a_row_apply_in_their_order_with_their_scales():
    rng, rows, x = np.random.default_rng(4), [70], inputs(5, 100)
    weight = made(70, 100, "float32")
    scaled = adapter(1, 5, 100, rows, {effects.FACTOR: 1 + normal(rng, 70) / 4, effects.BIAS: normal(rng, 70)})
    plain, biased = adapter(2, 20, 100, rows), adapter(3, 3, 100, rows, {effects.BIAS: normal(rng, 70)})
    adapters = {1: scaled, 2: plain, 4: biased}
    ids = [[(2, 0.5), 1, (4, -2.0)], [1, (2, 3.0)], [(4, 0.25)], [], [1, 2, 4, 2, 1, 4, 2, 1]]
    delta = delta_of(x, ids, adapters, rows)
    got = torch.full((1, 5, 70), torch.nan)
    linear.product(x, weight, got, delta=delta)
    expected = parts(x, weight)[0].double()
    for t, row in enumerate(ids):
        for one in row:
            id, scale = one if isinstance(one, tuple) else (one, 1.0)
            expected[t] = changed(expected[t], x[t : t + 1], adapters[id], scale)
    close(got[0], expected)
    for t, row in enumerate(ids):
        alone = delta_of(x[t : t + 1], [row], adapters, rows)
        assert torch.equal(bits(alone.values[0]), bits(delta.values[t]))
        if any(one == 1 for one in row):
            assert torch.equal(bits(alone.factors[0]), bits(delta.factors[t]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_last_adapter_that_replaces_rows_counts_and_the_others_add_to_them(dtype):
    rng, x = np.random.default_rng(5), inputs(4, 96)
    weight = made(70, 96, dtype, segments=2)
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    whole_rows, some = normal(rng, 70, 96).to(kind), normal(rng, 3, 96).to(kind)
    places = torch.full((70,), -1, dtype=torch.int32)
    places[torch.tensor([0, 69, 30])] = torch.arange(3, dtype=torch.int32)
    shift, own = normal(rng, 70), made(70, 96, dtype, segments=2)
    own.data[:, :] = torch.nan  # the model's own rows may be anything
    adapters = {
        1: Adapter([None], ({effects.ROWS: whole_rows},)),
        2: Adapter([None], ({effects.ROWS: some, effects.PLACES: places, effects.SHIFT: shift},)),
        3: adapter(3, 4, 96, [70]),
    }
    delta = delta_of(x, [[3, 1], [1, 2], [2, 1, 3], 2], adapters, [70], dtype=dtype)
    got = torch.full((2, 4, 70), torch.nan)
    linear.product(x, own, got, delta=delta)
    rounded = x.to(kind).double()
    y = rounded @ whole_rows.double().T
    mixed = y.clone()
    mixed[:, [0, 69, 30]] = rounded @ some.double().T
    low = exact(x, adapters[3].pairs[0])
    close(joined(got)[:3], torch.stack([(y + low)[0], (mixed + shift)[1], (y + low + shift)[2]]))
    linear.product(x, weight, got, delta=delta)
    expected = exact_product(x, weight)[3]
    expected[[0, 69, 30]] = mixed[3, [0, 69, 30]]
    close(joined(got)[3], expected + shift)
    out = torch.full((4, 70), torch.nan)
    linear.whole_product(x, weight, out, None, delta)
    assert torch.equal(bits(out), bits(joined(got)))


def exact_product(x, weight):
    return x.to(weight.data.dtype).double() @ weight.data.double().T


def test_adapters_are_in_effect_from_their_first_positions_on():
    rows = torch.zeros(3, effects.LEVELS, effects.ROW_FIELDS, dtype=torch.int32)
    scale = torch.tensor([0.5]).view(torch.int32)
    for level, (id, start) in enumerate(((3, 0), (2, 4), (5, 2))):
        rows[1, level] = torch.tensor([id, start, scale])
    tables = torch.zeros(ADAPTERS, effects.TABLE_FIELDS, dtype=torch.int64)
    tables[5, 1] = effects.SCALES
    rows_T, positions_T = torch.tensor([[0, 1, 1, 1, 2], [9, 0, 2, 7, 9]], dtype=torch.int32)
    found = effect_of([0] * 5, tables)
    effects.find_in_effect(rows_T, positions_T, rows, tables, found)
    assert found.adapters_TL[:, :4].tolist() == [[0] * 4, [3, 0, 0, 0], [3, 5, 0, 0], [3, 2, 5, 0], [0] * 4]
    assert found.applied_T.tolist() == [0, 1, 2 + effects.SCALES, 3 + effects.SCALES, 0]
    assert (found.scales_TL[3, :3] == 0.5).all()
    chosen = effect_of([0] * 2, tables)
    effects.find_in_effect(rows_T, positions_T, rows, tables, chosen, torch.tensor([3, 0], dtype=torch.int32))
    assert torch.equal(chosen.adapters_TL, found.adapters_TL[[3, 0]])


def test_shapes_are_checked():
    x, tables = inputs(2, 64), torch.zeros(1, 2, dtype=torch.int64)
    effect = effect_of([0, 0], tables)
    with pytest.raises(ValueError, match="inner must be"):
        kernels.shrink(x, effect, tables, 0, torch.zeros(1, 2, effects.LEVELS, 2, kernels.MAX_RANK))
    inner, delta = torch.zeros(1, 1, effects.LEVELS, 2, kernels.MAX_RANK), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="2 matrices for 1 parts"):
        kernels.grow(x, inner, effect, tables, 0, delta, delta, [4, 4], "float32")
