"""The gated delta rule: against transformers, and the same bits however a sequence is cut and whatever lies beside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvasir.caches import State
from kvasir.layers.kv_cache import KVCache
from kvasir.ops.activation import silu
from kvasir.ops.gated_delta import Heads, delta_gates, gated_delta, plan
from tests.layers.parts import Part, batch_of

HEADS = Heads(qk=2, v=6, dim=5, v_dim=7)
TAPS, SIZE, LENGTH = 4, 16, 75
SPEC = State((HEADS.v, HEADS.v_dim, HEADS.dim), HEADS.inputs, TAPS - 1)
KERNEL = torch.randn(HEADS.channels, TAPS, generator=torch.Generator().manual_seed(7))


def inputs(seed: int, count: int = LENGTH) -> torch.Tensor:
    """float32 [count, I]: channels, then beta and decay in (0, 1)."""
    x = torch.randn(count, HEADS.inputs, generator=torch.Generator().manual_seed(seed))
    x[:, HEADS.channels :] = torch.rand(count, 2 * HEADS.v, generator=torch.Generator().manual_seed(seed + 1))
    return x


def new_cache(blocks: int = 16, size: int = SIZE) -> KVCache:
    cache = KVCache((SPEC,), [blocks], size, torch.bfloat16)
    cache.fill_(torch.nan)
    return cache


def table(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def step(cache: KVCache, parts, kernel: torch.Tensor = KERNEL, act=silu) -> list[torch.Tensor]:
    """parts: (rows of inputs, start, block table) of each sequence."""
    batch = batch_of([Part([0] * len(x), start, (blocks,)) for x, start, blocks in parts], cache)
    x_TI = torch.full((len(batch.tokens_T), HEADS.inputs), torch.nan)  # the rows that fill up are anything
    x_TI[: batch.num_tokens] = torch.cat([x for x, *_ in parts])
    out = gated_delta(x_TI, kernel, cache.state(0), cache.inputs(0), batch.states(0), HEADS, act)
    assert (out[batch.num_tokens :] == 0).all()
    return [out[a:b] for a, b in zip(batch.starts[:-1], batch.starts[1:], strict=True)]


def whole(x: torch.Tensor, size: int = SIZE, **how) -> torch.Tensor:
    blocks = -(-len(x) // size)
    return step(new_cache(blocks + 1, size), [(x, 0, table(*range(1, blocks + 1)))], **how)[0]


def reference(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    """[count, V, e] by transformers' own functions, the convolution by torch's."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as rule

    channels = x[:, : HEADS.channels].T[None]
    mixed = F.silu(F.conv1d(F.pad(channels, (TAPS - 1, 0)), kernel[:, None], groups=HEADS.channels))[0].T
    wide = HEADS.qk * HEADS.dim
    q, k, v = (part[None] for part in mixed.split((wide, wide, HEADS.v * HEADS.v_dim), 1))
    beta, decay = x[None, :, HEADS.channels :].chunk(2, -1)
    q, k, v = q.unflatten(-1, (HEADS.qk, -1)), k.unflatten(-1, (HEADS.qk, -1)), v.unflatten(-1, (HEADS.v, -1))
    return rule(q, k, v, g=decay.log(), beta=beta, use_qk_l2norm_in_kernel=True)[0][0]


@pytest.mark.slow
def test_against_transformers():
    pytest.importorskip("transformers", reason="transformers is the oracle of this test")
    x = inputs(1)
    x[:, -HEADS.v :] = 0.9 + 0.1 * x[:, -HEADS.v :]  # a memory that reaches over several blocks
    expected = reference(x, KERNEL)
    torch.testing.assert_close(whole(x), expected, rtol=1e-4, atol=1e-5)
    forgetful = x.clone()
    forgetful[:SIZE, -HEADS.v :] = 0.0
    assert (reference(forgetful, KERNEL)[40:] - expected[40:]).abs().max() > 1e-2, "nothing of the first block is left"


def test_decays_of_each_dimension():
    """Against the recurrence as a loop; equal decays of a head have the bits of one decay."""
    heads = replace(HEADS, decays=HEADS.dim)
    one = inputs(1)
    each = torch.cat([one[:, : -HEADS.v], one[:, -HEADS.v :].repeat_interleave(HEADS.dim, 1)], 1)
    assert torch.equal(whole_of(each, heads), whole(one))
    decays = torch.rand(LENGTH, HEADS.v * HEADS.dim, generator=torch.Generator().manual_seed(5))
    each[:, -HEADS.v * HEADS.dim :] = 0.8 + 0.2 * decays
    torch.testing.assert_close(whole_of(each, heads), looped(each, heads), rtol=1e-4, atol=1e-5)


def whole_of(x: torch.Tensor, heads: Heads) -> torch.Tensor:
    cache = KVCache((State((heads.v, heads.v_dim, heads.dim), heads.inputs, TAPS - 1),), [6], SIZE, torch.bfloat16)
    cache.fill_(torch.nan)
    batch = batch_of([Part([0] * LENGTH, 0, (table(1, 2, 3, 4, 5),))], cache)
    x_TI = torch.zeros(len(batch.tokens_T), heads.inputs)
    x_TI[:LENGTH] = x
    return gated_delta(x_TI, KERNEL, cache.state(0), cache.inputs(0), batch.states(0), heads, silu)[:LENGTH]


def looped(x: torch.Tensor, heads: Heads) -> torch.Tensor:
    h, channels = heads, x[:, : heads.channels].T[None]
    mixed = F.silu(F.conv1d(F.pad(channels, (TAPS - 1, 0)), KERNEL[:, None], groups=h.channels))[0].T
    q, k, v = mixed.split((h.qk * h.dim, h.qk * h.dim, h.v * h.v_dim), 1)
    q, k = (F.normalize(part.view(-1, h.qk, h.dim), dim=-1).repeat_interleave(h.v // h.qk, 1) for part in (q, k))
    v, gates = v.view(-1, h.v, h.v_dim), x[:, h.channels :]
    state, out = torch.zeros(h.v, h.v_dim, h.dim), []
    for t in range(len(x)):
        state = state * gates[t, h.v :].view(h.v, 1, h.dim)
        missing = v[t] - torch.einsum("ved,vd->ve", state, k[t])
        state = state + torch.einsum("ve,vd->ved", missing * gates[t, : h.v, None], k[t])
        out.append(torch.einsum("ved,vd->ve", state, q[t] * h.dim**-0.5))
    return torch.stack(out)


def test_gates_against_torch():
    raw = torch.randn(4, 64, 6, generator=torch.Generator().manual_seed(3)) * torch.tensor([3.0, 12.0, 1.0, 1.0])[
        :, None, None
    ]  # fmt: skip
    beta, decay = delta_gates(raw[0], raw[1], raw[2, 0], raw[3, 0])
    torch.testing.assert_close(beta, torch.sigmoid(raw[0]))
    torch.testing.assert_close(decay, (-raw[2, 0].exp() * F.softplus(raw[1] + raw[3, 0])).exp())
    whole = torch.stack(delta_gates(raw[0], raw[1], raw[2, 0], raw[3, 0]))
    for row in (0, 13, 63):
        alone = delta_gates(raw[0, row : row + 1], raw[1, row : row + 1], raw[2, 0], raw[3, 0])
        assert torch.equal(torch.stack(alone)[:, 0], whole[:, row])


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [16, 16, 43], [15, 1, 1, 47], [17, 31, 2], [3, 70]])
def test_chunks_give_the_same_bits_as_one_pass(chunks):
    x, cache, start, rows = inputs(1), new_cache(), 0, []
    for count in [*chunks, LENGTH - sum(chunks)]:
        if count:
            rows += step(cache, [(x[start : start + count], start, table(3, 9, 1, 7, 4))])
            start += count
    assert torch.equal(torch.cat(rows), whole(x))


@pytest.mark.parametrize("size", [8, 32, 64, 128])
def test_block_sizes_do_not_change_the_result(size):
    x = inputs(1)
    assert torch.equal(whole(x, size), whole(x))


@pytest.mark.parametrize("budget", [1, plan.BUDGET])
def test_a_sequence_does_not_depend_on_others_of_any_length(budget, monkeypatch):
    """Also where the memory bound lets only one walk at a time."""
    monkeypatch.setattr(plan, "BUDGET", budget)
    sequences = [inputs(seed, count) for seed, count in ((1, 75), (5, 16), (9, 33), (13, 1))]
    tables = [table(1, 2, 3, 4, 5), table(6), table(7, 8, 9), table(10)]
    cache, done, rows = new_cache(), [0] * 4, [[] for _ in sequences]
    for counts in ([20, 0, 16, 1], [12, 7, 1, 0], [1, 8, 16, 0], [42, 1, 0, 0]):
        picked = [i for i in (2, 0, 3, 1) if counts[i]]
        parts = [(sequences[i][done[i] : done[i] + counts[i]], done[i], tables[i]) for i in picked]
        for i, out in zip(picked, step(cache, parts), strict=True):
            rows[i].append(out)
            done[i] += counts[i]
    for x, found in zip(sequences, rows, strict=True):
        assert torch.equal(torch.cat(found), whole(x))


def test_rejected_drafts_leave_no_trace():
    """Wrong rows from 43 on, over the border of a block; then the right ones."""
    x, cache, blocks = inputs(1), new_cache(), table(1, 2, 3, 4, 5)
    step(cache, [(x[:43], 0, blocks)])
    step(cache, [(inputs(99, 27), 43, blocks)])
    rows = [step(cache, [(x[a:b], a, blocks)])[0] for a, b in ((43, 47), (47, 48), (48, 75))]
    assert torch.equal(torch.cat(rows), whole(x)[43:])


@pytest.mark.parametrize("start", [31, 32, 33, 35, 47])
def test_a_prefix_is_continued_from_its_end(start):
    """By another sequence, of which only the block of the last token is there, or a copy of it."""
    x, cache = inputs(1), new_cache()
    step(cache, [(x[:start], 0, table(1, 2, 3, 4, 5))])
    cache.copy(0, [(1 + start // SIZE, 10)] if start % SIZE else [])
    mine = np.array([max(0, b - 1) for b in range(1, 6)], np.int32)  # stale: they point anywhere
    mine[start // SIZE - 1] = start // SIZE if start % SIZE == 0 else 15
    mine[start // SIZE :] = range(10, 10 + 5 - start // SIZE)
    seen = {*mine[(start - 1) // SIZE :]} - {0}
    cache.tensors[0][:, :, [b for b in range(16) if b not in seen]] = torch.nan
    others = cache.tensors[0][:, :, :10].clone()
    assert torch.equal(step(cache, [(x[start:], start, mine)])[0], whole(x)[start:])
    assert torch.equal(cache.tensors[0][:, :, 1:10].nan_to_num(), others[:, :, 1:].nan_to_num()), "not its own"


def test_nan_stays_with_its_sequence():
    x, sick = inputs(1), inputs(5)
    sick[40] = torch.nan
    healthy, spoiled = step(new_cache(), [(x, 0, table(1, 2, 3, 4, 5)), (sick, 0, table(6, 7, 8, 9, 10))])
    assert torch.equal(healthy, whole(x))
    assert torch.equal(spoiled[:40], whole(inputs(5))[:40])
    assert spoiled[40:].isnan().all()


def test_a_layer_that_looks_ahead_fails_an_assertion():
    batch = batch_of([Part([0] * 3, 0, (table(1),), causal=False)], new_cache())
    with pytest.raises(AssertionError, match="recurrent layer"):
        batch.states(0)
