"""The Triton kernels of mixtures of experts against the torch bodies."""

from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.ops.linear.triton import DeviceMatrix, matrix_from_floats
from kvasir.ops.moe.body import route as torch_route
from kvasir.ops.moe.routing import Routing
from kvasir.ops.moe.triton import (
    TILE_FIELDS,
    combine,
    expert_down,
    expert_gated,
    most_tiles,
    route,
    rows_of,
    sort_by_expert,
)
from kvasir.parallel import cut


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, -7, dtype=torch.int32)


def _put(array) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _experts(values: torch.Tensor, dtype: str, segments: int = 1) -> DeviceMatrix:
    """Matrices [E, N, K] as planes of all experts."""
    found = [matrix_from_floats(each, dtype, segments, _put) for each in values]
    return replace(found[0], data=torch.stack([each.data for each in found]))


def _routed(logits: torch.Tensor, top: int, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = _empty(len(logits), top), torch.full((len(logits), top), torch.nan)
    route(logits, ids, weights, normalise)
    return ids, weights


@given(rows=st.integers(1, 4), experts=st.integers(1, 40), data=st.data(), normalise=st.booleans(), ties=st.booleans())
@settings(max_examples=25, deadline=None)
def test_route_equals_the_torch_body(rows, experts, data, normalise, ties):
    top = data.draw(st.integers(1, min(experts, 6)))
    logits = _random(rows, experts, seed=experts)
    if ties:
        logits = logits.round()
    ids, weights = _routed(logits, top, normalise)
    expected_ids, expected = torch_route(logits, Routing(top, normalise=normalise))
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected)


def test_weights_are_multiplied_by_the_scales_of_their_experts():
    logits, scales = _random(3, 20, seed=1), _random(20, seed=2)
    ids, weights = _empty(3, 4), torch.full((3, 4), torch.nan)
    route(logits, ids, weights, True, scales)
    expected_ids, expected = torch_route(logits, Routing(4), None, scales)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected)


def test_experts_with_logits_of_minus_infinity_are_chosen_last():
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 4] = 1.0
    ids, weights = _routed(logits, 3, True)
    assert ids.tolist() == [[0, 1, 4]]
    assert weights.tolist() == [[0.0, 0.0, 1.0]]


def test_row_of_nan_gets_experts_that_exist():
    logits = torch.full((2, 5), torch.nan)
    logits[1] = torch.arange(5.0)
    ids, weights = _routed(logits, 2, False)
    assert ids.tolist() == [[0, 1], [3, 4]]
    assert weights[0].isnan().all()
    assert not weights[1].isnan().any()


def _sorted(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order, num_tiles = _empty(ids.numel()), _empty(1)
    found = _empty(most_tiles(ids.numel(), experts), TILE_FIELDS)
    sort_by_expert(ids, order, found, num_tiles, experts=experts)
    return order, found, num_tiles


@pytest.mark.parametrize(("rows", "top", "experts"), [(1, 1, 1), (1, 3, 7), (25, 3, 4), (70, 2, 3), (40, 4, 64)])
def test_pairs_are_sorted_by_expert(rows, top, experts):
    ids = torch.stack([torch.randperm(experts)[:top].sort().values for _ in range(rows)]).int()
    order, found, num_tiles = _sorted(ids, experts)
    assert torch.equal(order.long(), ids.flatten().sort(stable=True).indices)
    tiles, place = found[: int(num_tiles)].tolist(), 0
    for expert, first, count in tiles:
        assert first == place
        assert 0 < count <= rows_of(ids.numel(), experts)
        assert (ids.flatten()[order[first : first + count].long()] == expert).all()
        place += count
    assert place == ids.numel()


def _run(x, ids, weights, gate, up, down, act="silu") -> torch.Tensor:
    pairs, (inner, width) = ids.numel(), gate.shape
    places = _sorted(ids, len(gate.data))
    hidden = torch.full((pairs, inner), torch.nan, dtype=down.data.dtype)
    parts, out = torch.full((down.segments, pairs, width), torch.nan), torch.empty(len(x), width)
    expert_gated(x, gate, up, *places, hidden, act)
    expert_down(hidden, down, *places, parts)
    combine(parts, weights, out)
    return out


def _weights(experts: int, inner: int, width: int) -> list[torch.Tensor]:
    shapes = (experts, inner, width), (experts, inner, width), (experts, width, inner)
    return [_random(*shape, seed=seed) / shape[2] ** 0.5 for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 3e-3)])
@pytest.mark.parametrize(("rows", "segments", "inner", "width"), [(1, 1, 24, 40), (30, 4, 128, 70)])
def test_products_of_experts(dtype, tolerance, rows, segments, inner, width):
    gate, up, down = _weights(5, inner, width)
    x = _random(rows, width, seed=9)
    ids, weights = _routed(_random(rows, 5, seed=8), 2, True)
    expected = torch.zeros(rows, width, dtype=torch.float64)
    for t in range(rows):
        for j, e in enumerate(ids[t].tolist()):
            g, u, d = (each[e].double() for each in (gate, up, down))
            hidden = torch.nn.functional.silu(g @ x[t].double()) * (u @ x[t].double())
            expected[t] += weights[t, j].double() * (d @ hidden)
    found = _run(x, ids, weights, _experts(gate, dtype), _experts(up, dtype), _experts(down, dtype, segments))
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_a_row_do_not_depend_on_the_batch(dtype):
    gate, up, down = (_experts(each, dtype, s) for each, s in zip(_weights(3, 64, 40), (1, 1, 2), strict=True))
    x, logits = _random(26, 40, seed=9), _random(26, 3, seed=8)
    ids, weights = _routed(logits, 2, False)
    assert rows_of(52, 3) == 32 != rows_of(2, 3)
    together = _run(x, ids, weights, gate, up, down)
    for t in (0, 7, 25):
        alone_ids, alone_weights = _routed(logits[t : t + 1], 2, False)
        assert torch.equal(alone_ids[0], ids[t])
        assert torch.equal(alone_weights[0], weights[t])
        assert torch.equal(_run(x[t : t + 1], alone_ids, alone_weights, gate, up, down)[0], together[t])


def test_rows_of_other_experts_do_not_see_nan():
    gate, up, down = (_experts(each, "float32") for each in _weights(3, 16, 16))
    gate.data[2] = torch.nan
    ids = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    out = _run(_random(2, 16), ids, torch.ones(2, 2), gate, up, down)
    assert out[1].isnan().all()
    assert not out[0].isnan().any()


def test_sum_over_experts_is_in_ascending_id():
    parts, weights, out = _random(2, 6, 10), _random(2, 3, seed=1), torch.empty(2, 10)
    combine(parts, weights, out)
    whole = (parts[0] + parts[1]).view(2, 3, 10)
    expected = torch.zeros(2, 10)
    for j in range(3):
        expected = expected + weights[:, j, None] * whole[:, j]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_hold_some_experts_have_the_bits_of_one_that_holds_all(ranks):
    experts, top = 6, 3
    weights_of = [_experts(each, "float32") for each in _weights(experts, 16, 32)]
    x = _random(9, 32)
    ids = torch.stack([torch.randperm(experts)[:top].sort().values for _ in range(9)]).int()
    weights = _random(9, top, seed=7)
    expected = _run(x, ids, weights, *weights_of)
    joined = []
    for rank in range(ranks):
        first, last = cut(experts, ranks).range(rank)
        gate, up, down = (replace(each, data=each.data[first:last].contiguous()) for each in weights_of)
        order, found, num_tiles = torch.full((ids.numel(),), -1, dtype=torch.int32), _empty(64, TILE_FIELDS), _empty(1)
        sort_by_expert(ids, order, found, num_tiles, experts=last - first, first=first)
        own = ((ids >= first) & (ids < last)).flatten()
        assert sorted(order[: int(own.sum())].tolist()) == own.nonzero().flatten().tolist()
        hidden, parts = (
            torch.full((ids.numel(), 16), torch.nan),
            torch.full((down.segments, ids.numel(), 32), torch.nan),
        )
        expert_gated(x, gate, up, order, found, num_tiles, hidden, "silu")
        expert_down(hidden, down, order, found, num_tiles, parts)
        joined.append(parts[0])
    out = torch.empty(9, 32)
    combine(torch.stack(joined), weights, out, ids, experts)
    assert torch.equal(out, expected)
