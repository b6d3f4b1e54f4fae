import torch
import torch.nn.functional as F

from kvasir.layers.moe import MoE
from kvasir.layers.tensors import TensorPlace
from kvasir.ops.moe.routing import Routing

CPU = torch.device("cpu")
WIDTH, INNER, EXPERTS = 64, 32, 4


def filled(dtype: torch.dtype = torch.float32, **settings) -> tuple[MoE, dict[str, torch.Tensor]]:
    layer = MoE(WIDTH, INNER, EXPERTS, Routing(2, normalise=settings.pop("normalise", True)), **settings)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for path, leaf in layer.walk():
        for name, shape in leaf.expects().items():
            tensors[f"{path}.{name}"] = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            leaf.put(name, tensors[f"{path}.{name}"], TensorPlace(dtype))
    return layer, tensors


def expected(x: torch.Tensor, tensors: dict[str, torch.Tensor], normalise: bool) -> torch.Tensor:
    """All experts on all rows, weighted."""
    shares = F.linear(x, tensors["router.weight"]).softmax(-1)
    top = shares.topk(2, dim=-1)
    values = top.values / top.values.sum(-1, keepdim=True) if normalise else top.values
    shares = torch.zeros_like(shares).scatter(1, top.indices, values)
    total = torch.zeros_like(x)
    for e in range(EXPERTS):
        gate, up, down = (tensors[f"experts.{e}.{n}.weight"] for n in ("gate_up.gate", "gate_up.up", "down"))
        total += shares[:, e : e + 1] * F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    return total


def test_each_experts_tensors_have_a_path_of_their_own():
    _, tensors = filled()
    names = ("gate_up.gate", "gate_up.up", "down")
    assert tensors.keys() == {"router.weight", *(f"experts.{e}.{n}.weight" for e in range(EXPERTS) for n in names)}
    assert tensors["experts.3.down.weight"].shape == (WIDTH, INNER)


def test_against_all_experts_on_all_rows():
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    for normalise in (False, True):
        layer, tensors = filled(normalise=normalise)
        torch.testing.assert_close(layer(x, None), expected(x, tensors, normalise), rtol=1e-5, atol=1e-5)


def test_the_router_stays_in_float32():
    layer, tensors = filled(torch.bfloat16)
    assert torch.equal(layer.router.weights["weight"][0], tensors["router.weight"])
    assert layer.experts[0].down.weights["weight"].dtype == torch.bfloat16
