import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kvasir.ops.activation import ACTIVATIONS, clamped_swiglu, silu
from kvasir.ops.moe import experts, route
from kvasir.ops.moe.routing import Routing
from tests.examples import examples

# max error over max value: float32 sums of about 100 products; bfloat16 rounds inputs and results at 2^-9, three
# products deep.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reference(logits: torch.Tensor, top_k: int, normalise: bool) -> torch.Tensor:
    """The weight of every expert, 0 where it is not chosen, float64 [T, E]."""
    shares = logits.double().softmax(-1)
    top = shares.topk(top_k, dim=-1)
    values = top.values / top.values.sum(-1, keepdim=True) if normalise else top.values
    return torch.zeros_like(shares).scatter(1, top.indices, values)


@pytest.mark.parametrize("normalise", (False, True))
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (5, 5), (3, 1), (1, 1)])
def test_route_against_float64(num_experts, top_k, normalise):
    logits = normal(40, num_experts) * 3
    ids, weights = route(logits, Routing(top_k, normalise=normalise))
    assert ids.shape == weights.shape == (40, top_k) and ids.dtype == torch.int64
    assert (ids.diff(dim=-1) > 0).all(), "ids ascend"
    found = torch.zeros(40, num_experts, dtype=torch.float64).scatter(1, ids, weights.double())
    torch.testing.assert_close(found, reference(logits, top_k, normalise), rtol=1e-6, atol=1e-9)


def deepseek(logits: torch.Tensor, bias: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The weight of every expert, 0 where it is not chosen, after arXiv:2412.19437 and its reference code."""
    scores = logits.double().sigmoid() if routing.scores == "sigmoid" else logits.double().softmax(-1)
    choice = (scores + bias).unflatten(1, (routing.groups, -1))
    ranks = choice.topk(routing.best_of_group, dim=-1).values.sum(-1)
    kept = torch.zeros_like(ranks).scatter(1, ranks.topk(routing.top_groups, dim=-1).indices, 1.0)
    choice = choice.masked_fill(kept.unsqueeze(-1) == 0, float("-inf")).flatten(1)
    ids = choice.topk(routing.top_k, dim=-1).indices
    values = scores.gather(1, ids)
    if routing.normalise:
        values = values / (values.sum(-1, keepdim=True) + routing.epsilon)
    return torch.zeros_like(scores).scatter(1, ids, values * routing.scale)


@pytest.mark.parametrize("scores", ("softmax", "sigmoid"))
@pytest.mark.parametrize("changes", [
    {},
    {"groups": 4, "top_groups": 2, "best_of_group": 2},
    {"groups": 4, "top_groups": 1},
    {"normalise": False, "scale": 2.5},
    {"epsilon": 0.25, "scale": 0.5},
])  # fmt: skip
def test_routing_with_scores_biases_and_groups_against_float64(scores, changes):
    routing = Routing(3, scores, **changes)
    logits, bias = normal(40, 16) * 2, normal(16, seed=1) * 0.3
    ids, weights = route(logits, routing, bias)
    assert (ids.diff(dim=-1) > 0).all(), "ids ascend"
    found = torch.zeros(40, 16, dtype=torch.float64).scatter(1, ids, weights.double())
    torch.testing.assert_close(found, deepseek(logits, bias, routing), rtol=1e-6, atol=1e-9)


def test_square_roots_of_softplus_against_float64():
    logits, bias = normal(40, 16) * 4, normal(16, seed=1) * 0.3
    routing = Routing(3, "sqrt_softplus", scale=1.5)
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    expected_ids = (scores + bias).topk(3).indices.sort().values
    ids, weights = route(logits, routing, bias)
    chosen = scores.gather(1, expected_ids)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.double(), chosen / chosen.sum(-1, keepdim=True) * 1.5, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("closeness", [0.01, 0.2, 2.0])
def test_sparse_mixing_against_its_publication(closeness):
    """One expert at a time: a softmax over the logits within 2 epsilon of the greatest, relative to the larger
    magnitude."""
    logits = normal(60, 8) * 2
    ids, weights = route(logits, Routing(2, "sparsemixer", epsilon=closeness))
    for row, found_ids, found in zip(logits.double(), ids.tolist(), weights.tolist(), strict=True):
        left, expected = row.clone(), {}
        for _ in range(2):
            best = int(left.argmax())
            close = (left[best] - row) / row.abs().clamp(min=float(left[best])) <= 2 * closeness
            terms = torch.where(close, torch.exp(left - left[best]), 0.0)
            expected[best] = float(terms[best] / terms.sum())
            left[best] = -torch.inf
        assert found_ids == sorted(expected)
        assert found == pytest.approx([expected[i] for i in found_ids], rel=1e-6)


def test_sparse_mixing_keeps_nan_in_its_row_and_takes_the_lower_of_equals():
    routing = Routing(2, "sparsemixer", epsilon=0.1)
    ids, weights = route(torch.tensor([[1.0, 1.0, 1.0], [torch.nan, 1.0, 2.0], [0.0, 1.0, 2.0]]), routing)
    assert ids[0].tolist() == [0, 1] and weights[0].tolist() == pytest.approx([1 / 3, 0.5])
    assert weights[1].isnan().any() and len(set(ids[1].tolist())) == 2
    assert torch.equal(weights[2], route(torch.tensor([[0.0, 1.0, 2.0]]), routing)[1][0])


def test_equal_groups_go_to_the_lower_number():
    routing = Routing(2, "sigmoid", groups=4, top_groups=1)
    assert route(torch.zeros(1, 8), routing)[0].tolist() == [[0, 1]]


def test_equal_logits_go_to_the_lower_id():
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 0.0, 2.0], [0.0, -0.0, 0.0, -1.0], [1.0, 2.0, 2.0, 2.0]])
    ids, weights = route(logits, Routing(2))
    assert ids.tolist() == [[0, 1], [1, 3], [0, 1], [1, 2]]
    assert weights.tolist() == [[0.5, 0.5]] * 4
    many = torch.zeros(32, 256)
    many[:, 200] = 1.0
    assert route(many, Routing(4, normalise=False))[0].tolist() == [[0, 1, 2, 200]] * 32


def test_routing_of_extreme_and_nan_logits():
    """Extreme logits share nothing with the others, and what is no number stays in its row."""
    ids, weights = route(torch.tensor([[1e30, -1e30, 0.0], [torch.nan, 1.0, 2.0], [0.0, 1.0, 2.0]]), Routing(2))
    assert (ids[0].tolist(), weights[0].tolist()) == ([0, 2], [1.0, 0.0])
    assert weights[1].isnan().any()
    assert ids[1].min() >= 0 and ids[1].max() < 3
    assert torch.equal(weights[2], route(torch.tensor([[0.0, 1.0, 2.0]]), Routing(2))[1][0])


@examples(40)
@given(
    num_experts=st.sampled_from([1, 2, 7, 8, 60, 128]),
    place=st.integers(0, 70),
    company=st.sampled_from([0.0, torch.nan, torch.inf]),
    normalise=st.booleans(),
)
def test_a_routed_row_depends_on_itself_alone(num_experts, place, company, normalise):
    row = normal(1, num_experts) * 3
    top_k = min(4, num_experts)
    crowd = torch.full((71, num_experts), company)
    crowd[place] = row
    alone, together = route(row, Routing(top_k, normalise=normalise)), route(crowd, Routing(top_k, normalise=normalise))
    assert torch.equal(together[0][place], alone[0][0]) and torch.equal(together[1][place], alone[1][0])


# --- experts ----------------------------------------------------------------------------------------

E, D, INNER = 6, 64, 48


def matrices(dtype: torch.dtype, segments: int = 1) -> tuple[list, list, list]:
    """Per expert gate and up [1, INNER, D] and down [segments, D, INNER / segments]."""
    pad = -D % 32, -(INNER // segments) % 32 if dtype != torch.float32 else 0
    gate = [F.pad(normal(1, INNER, D, seed=e) / D**0.5, (0, pad[0])).to(dtype) for e in range(E)]
    up = [F.pad(normal(1, INNER, D, seed=100 + e) / D**0.5, (0, pad[0])).to(dtype) for e in range(E)]
    down = [
        F.pad(normal(segments, D, INNER // segments, seed=200 + e) / INNER**0.5, (0, pad[1])).to(dtype)
        for e in range(E)
    ]
    return gate, up, down


def routed(rows: int, top_k: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return normal(rows, D, seed=7), *route(normal(rows, E, seed=8), Routing(top_k))


def dense(x, ids, weights, gate, up, down, act) -> torch.Tensor:
    """Every row through each of its experts, in float64."""
    rows = []
    for row, chosen, shares in zip(x.double(), ids.tolist(), weights.double(), strict=True):
        total = torch.zeros(D, dtype=torch.float64)
        for e, share in zip(chosen, shares, strict=True):
            inner = act(row @ gate[e][0].double().T) * (row @ up[e][0].double().T)
            parts = inner.view(len(down[e]), -1)
            whole = torch.cat(list(down[e][..., : parts.shape[1]]), dim=1).double()
            total += share * (whole @ inner)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("segments", (1, 2))
@pytest.mark.parametrize("act", ("silu", "gelu_pytorch_tanh"))
def test_experts_against_float64(dtype, segments, act):
    given = (*routed(50), *matrices(dtype, segments), ACTIVATIONS[act])
    found, exact = experts(*given), dense(*given)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < TOLERANCE[dtype] * exact.abs().max()


@pytest.mark.usefixtures("exact_linear")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("company", (0.0, 1.0, torch.nan))
@pytest.mark.parametrize("place", (0, 31, 40))
def test_a_row_depends_on_itself_alone(dtype, company, place):
    """Whether its neighbours go to the same experts or to others, or are no numbers."""
    x, ids, weights = routed(1)
    parts = matrices(dtype, 2)
    alone = experts(x, ids, weights, *parts, silu)[0]
    crowd, crowd_ids = torch.full((41, D), company), routed(41)[1]
    shares = torch.full((41, 3), 0.25)
    crowd[place], crowd_ids[place], shares[place] = x[0], ids[0], weights[0]
    assert torch.equal(experts(crowd, crowd_ids, shares, *parts, silu)[place], alone)
    same = ids.expand(41, -1).contiguous()
    assert torch.equal(experts(crowd, same, shares, *parts, silu)[place], alone)


@pytest.mark.parametrize("weigh_inputs", (False, True))
def test_biases_a_clamped_gate_and_weighted_inputs(weigh_inputs):
    x, ids, weights = routed(40)
    gate, up, down = (normal(E, *shape, seed=i) for i, shape in enumerate([(INNER, D), (INNER, D), (D, INNER)], 20))
    biases = [normal(E, n, seed=i) * 3 for i, n in enumerate((INNER, INNER, D), 30)]
    stacks = [[m.unsqueeze(0) for m in stack] for stack in (gate, up, down)]
    found = experts(x, ids, weights, *stacks, clamped_swiglu, None, tuple(map(list, biases)), weigh_inputs)
    expected = torch.zeros(40, D, dtype=torch.float64)
    for row, (its_ids, its_weights) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for e, weight in zip(its_ids, its_weights, strict=True):
            y = x[row].double() * (weight if weigh_inputs else 1.0)
            g, u = (m[e].double() @ y + b[e].double() for m, b in ((gate, biases[0]), (up, biases[1])))
            g, u = g.clamp(max=7), u.clamp(-7, 7)
            out = down[e].double() @ (g * torch.sigmoid(1.702 * g) * (u + 1)) + biases[2][e].double()
            expected[row] += out * (1.0 if weigh_inputs else weight)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_limits_of_the_gate_and_of_its_factor():
    """After the activation, as Step-3.5 has them."""
    x, ids, weights = routed(40)
    stacks = [normal(E, 1, *shape, seed=i) for i, shape in enumerate([(INNER, D), (INNER, D), (D, INNER)], 20)]
    gate, up, down = ([m for m in stack] for stack in stacks)
    found = experts(x, ids, weights, gate, up, down, silu, limit=1.5)
    expected = torch.zeros(40, D, dtype=torch.float64)
    for row, (its_ids, its_weights) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for e, weight in zip(its_ids, its_weights, strict=True):
            g, u = (m[e][0].double() @ x[row].double() for m in (gate, up))
            inner = (g * torch.sigmoid(g)).clamp(max=1.5) * u.clamp(-1.5, 1.5)
            expected[row] += weight * (down[e][0].double() @ inner)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert not torch.equal(found, experts(x, ids, weights, gate, up, down, silu, limit=2.0))


def test_outputs_are_added_in_ascending_id():
    """Rounded products one after the other: 1e8, then -1e8, then 1; another order loses the 1."""
    ones = [torch.ones(1, 1, 1)] * 3
    down = [torch.full((1, 1, 1), value) for value in (1e8, -1e8, 1.0)]
    x, ids = torch.ones(1, 1), torch.tensor([[0, 1, 2]])
    found = experts(x, ids, torch.ones(1, 3), ones, ones, down, ACTIVATIONS["relu"])
    assert found.item() == 1.0
