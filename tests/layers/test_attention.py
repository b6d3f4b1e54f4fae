"""The attention layer over the paged cache, against attention over whole sequences in plain torch."""

import pytest
import torch
import torch.nn.functional as F

from kvasir.caches import PagedKV, Window
from kvasir.layers.attention import Attention, GatedAttention
from kvasir.layers.kv_cache import KVCache
from kvasir.layers.norm import OffsetRMSNorm
from kvasir.layers.rope import Rope
from kvasir.layers.tensors import TensorPlace
from tests.layers.parts import Part, batch_of, fill, on_ranks, randn

WIDTH, HEADS, KV_HEADS, DIM, LENGTH = 64, 8, 4, 8, 40
X = randn(64, WIDTH, seed=7)[:LENGTH]
SHAPE = (0, WIDTH, HEADS, KV_HEADS, DIM)


def run(layer: Attention, x=X, chunks=(), window=0, causal=True):
    """The layer's outputs for one sequence, which is computed in chunks of the given sizes and a rest."""
    cache = KVCache((layer.cache(window),), [6], 16, torch.float32)
    cache.fill_(float("nan"))
    ends = [*torch.tensor(chunks).cumsum(0).tolist(), len(x)] if chunks else [len(x)]
    out = []
    for start, end in zip([0, *ends], ends, strict=False):
        batch = batch_of([Part([0] * (end - start), start, [[5, 2, 4]], causal)], cache)
        padded = F.pad(x[start:end], (0, 0, 0, len(batch.tokens_T) - (end - start)))
        out.append(layer(padded, batch)[: end - start])
    return torch.cat(out)


def reference(t, *, mask=None, scale=DIM**-0.5, softcap=0.0, change=lambda q_or_k, name: q_or_k):
    """Attention over the whole sequence; change: applied to the heads of q and k, [T, heads, DIM]."""
    q, k, v = (F.linear(X, t[f"qkv.{n}.weight"], t.get(f"qkv.{n}.bias")).view(LENGTH, -1, DIM) for n in "qkv")
    q, k = change(q, "q"), change(k, "k")
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    mask = torch.ones(LENGTH, LENGTH).tril().bool() if mask is None else mask
    shares = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    mixed = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
    return F.linear(mixed, t["out.weight"], t.get("out.bias"))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_attention_over_a_prompt(bias):
    layer = Attention(*SHAPE, bias=bias, out_bias=bias)
    tensors = fill(layer)
    assert ("out.bias" in tensors, "qkv.k.bias" in tensors) == (bias, bias)
    close(run(layer), reference(tensors))


def test_a_window_hides_older_keys():
    layer = Attention(*SHAPE)
    tensors, ages = fill(layer), torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    close(run(layer, window=7), reference(tensors, mask=(ages >= 0) & (ages < 7)))


def test_an_indivisible_work_attends_in_both_directions():
    layer = Attention(*SHAPE)
    tensors = fill(layer)
    close(run(layer, causal=False), reference(tensors, mask=torch.ones(LENGTH, LENGTH).bool()))


def test_scale_and_softcap_of_the_scores():
    layer = Attention(*SHAPE, scale=1.5, softcap=2.0)
    tensors = fill(layer)
    close(run(layer), reference(tensors, scale=1.5, softcap=2.0))


def test_the_rotary_embedding_turns_q_and_k_by_their_position():
    rope = Rope(DIM, 100.0)
    layer = Attention(*SHAPE, rope=rope)
    cos, sin = (torch.from_numpy(part)[:, None] for part in rope.table(0, LENGTH))

    def turned(x, name):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    tensors = fill(layer)
    close(run(layer), reference(tensors, change=turned))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_head_norm_normalises_each_head_of_q_and_k(offset):
    more = {"head_norm": OffsetRMSNorm} if offset else {}
    layer = Attention(*SHAPE, head_norm_eps=1e-6, **more)
    tensors = fill(layer)

    def normalised(x, name):
        return F.rms_norm(x, (DIM,), tensors[f"{name}_norm.weight"] + offset, 1e-6)

    close(run(layer), reference(tensors, change=normalised))


@pytest.mark.usefixtures("exact_machine")
@pytest.mark.parametrize("chunks", [(1,), (16,), (3, 30)])
def test_chunks_have_the_bits_of_the_whole_prompt(chunks):
    layer = Attention(*SHAPE, rope=Rope(DIM, 100.0))
    fill(layer)
    assert torch.equal(run(layer, chunks=chunks), run(layer))
    assert torch.equal(run(layer, chunks=chunks, window=7), run(layer, window=7))


def test_a_gate_of_zero_halves_each_head():
    plain, gated = Attention(*SHAPE), GatedAttention(*SHAPE)
    tensors = fill(plain)
    tensors["gate.weight"] = torch.zeros(HEADS * DIM, WIDTH)
    for path, leaf in gated.walk():
        for name in leaf.expects():
            leaf.put(name, tensors[f"{path}.{name}"], TensorPlace(torch.float32))
    close(run(gated), run(plain) / 2)


def test_a_gate_weights_the_output_of_its_own_head():
    layer = GatedAttention(*SHAPE)
    tensors = fill(layer)
    gate = F.linear(X, tensors["gate.weight"]).sigmoid()
    identity = {**tensors, "out.weight": torch.eye(HEADS * DIM)}
    close(run(layer), F.linear(reference(identity) * gate, tensors["out.weight"]))


def test_the_cache_kind_has_the_key_heads():
    layer = Attention(*SHAPE)
    assert layer.cache() == PagedKV(KV_HEADS, DIM)
    assert layer.cache(window=12) == Window(KV_HEADS, DIM, window=12)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", [Attention, GatedAttention])
def test_ranks_that_share_the_heads_compute_what_one_does(kind, size):
    whole = kind(*SHAPE)
    fill(whole)
    expected = run(whole)
    for found in on_ranks(size, lambda: kind(*SHAPE), run):
        close(found, expected)
