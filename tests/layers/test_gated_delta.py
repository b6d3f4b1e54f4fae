"""The Gated DeltaNet layer over paged states, against the recurrence written as a loop."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kvasir.caches import State
from kvasir.layers.convolution import Convolution
from kvasir.layers.gated_delta import GatedDelta
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.tensors import TensorPlace
from kvasir.ops.gated_delta import Heads
from tests.layers.parts import Part, batch_of, fill, on_ranks, randn

WIDTH, TAPS, LENGTH, EPS = 32, 4, 40, 1e-6
HEADS = Heads(qk=4, v=8, dim=16, v_dim=12)
X = randn(64, WIDTH, seed=7)[:LENGTH]


def made() -> GatedDelta:
    return GatedDelta(0, WIDTH, HEADS, TAPS, EPS)


def run(layer: GatedDelta, chunks=()):
    cache = KVCache((layer.cache(),), [6], 16, torch.float32)
    cache.fill_(float("nan"))
    ends = [*torch.tensor(chunks).cumsum(0).tolist(), LENGTH] if chunks else [LENGTH]
    out = []
    for start, end in zip([0, *ends], ends, strict=False):
        batch = batch_of([Part([0] * (end - start), start, [[5, 2, 4]])], cache)
        out.append(layer(F.pad(X[start:end], (0, 0, 0, len(batch.tokens_T) - (end - start))), batch)[: end - start])
    return torch.cat(out)


def reference(t):
    h, share = HEADS, HEADS.v // HEADS.qk
    q, k, v, z = (F.linear(X, t[f"inputs.{part}.weight"]) for part in "qkvz")
    b, a = (F.linear(X, t[f"gates.{part}.weight"]) for part in "ba")
    write = b.sigmoid()
    decay = torch.exp(-t["A_log"].exp() * F.softplus(a + t["dt_bias"]))
    channels = torch.cat([q, k, v], 1).T[None]
    mixed = F.conv1d(F.pad(channels, (TAPS - 1, 0)), t["conv.weight"], groups=h.channels)[0].T
    q, k, v = F.silu(mixed).split((h.qk * h.dim, h.qk * h.dim, h.v * h.v_dim), 1)
    q, k = (F.normalize(x.view(LENGTH, h.qk, h.dim), dim=-1).repeat_interleave(share, 1) for x in (q, k))
    v, state, out = v.view(LENGTH, h.v, h.v_dim), torch.zeros(h.v, h.v_dim, h.dim), []
    for i in range(LENGTH):
        state = state * decay[i][:, None, None]
        missing = v[i] - torch.einsum("ved,vd->ve", state, k[i])
        state = state + torch.einsum("ve,vd->ved", missing * write[i][:, None], k[i])
        out.append(torch.einsum("ved,vd->ve", state, q[i] * h.dim**-0.5))
    normed = F.rms_norm(torch.stack(out), (h.v_dim,), t["norm.weight"], EPS)
    return F.linear((normed * F.silu(z.reshape(LENGTH, h.v, h.v_dim))).flatten(1), t["out.weight"])


def test_the_layer_computes_the_recurrence():
    layer = made()
    tensors = fill(layer)
    torch.testing.assert_close(run(layer), reference(tensors), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("exact_machine")
@pytest.mark.parametrize("chunks", [(1,), (16,), (3, 30)])
def test_chunks_have_the_bits_of_the_whole_prompt(chunks):
    layer = made()
    fill(layer)
    assert torch.equal(run(layer, chunks), run(layer))


def test_the_cache_kind_keeps_a_state_and_the_tokens_of_the_convolution():
    kind = made().cache(window=9)
    assert kind == State((HEADS.v, HEADS.v_dim, HEADS.dim), HEADS.inputs, TAPS - 1)


def test_rates_and_bias_stay_float32():
    layer = made()
    fill(layer, torch.bfloat16)
    assert layer.log_rate.dtype == layer.bias.dtype == layer.conv.kernel.dtype == torch.float32
    assert layer.inputs.weights["q"].dtype == torch.bfloat16


def test_a_convolution_keeps_the_channels_of_its_runs():
    conv, weight = Convolution(10, 3), randn(10, 1, 3)
    assert conv.expects() == {"weight": (10, 1, 3)}
    conv.runs = (1, 3), (6, 10)
    assert torch.equal(conv.put("weight", weight, TensorPlace(torch.bfloat16)), weight[[1, 2, 6, 7, 8, 9], 0])


@pytest.mark.few(4)
@pytest.mark.usefixtures("exact_machine")
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("v", [4, 8, 20, 32])
def test_ranks_that_share_the_heads_have_the_bits_of_one(size, v):
    """A library computes a product of few columns in another order, and b and a have one for each head of v."""

    def one() -> GatedDelta:
        return GatedDelta(0, WIDTH, replace(HEADS, v=v), TAPS, EPS)

    whole = one()
    fill(whole)
    expected = run(whole)
    assert all(torch.equal(found, expected) for found in on_ranks(size, one, run))
