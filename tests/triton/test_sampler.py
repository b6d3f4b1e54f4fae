"""The sampler's kernels give the reference's results in all bits."""

import dataclasses
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

import triton
import triton.language as tl
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from triton.runtime import interpreter

from kvasir.graph.draws import Draws, asked_of
from kvasir.ops.launch import launch, recording
from kvasir.plan import SamplingSpec
from kvasir.sampling import logprobs as reference
from kvasir.sampling import numerics, sampler
from kvasir.sampling import triton as kernels
from kvasir.sampling import triton_numerics as arithmetic
from kvasir.sampling.device_state import (
    ALL,
    MAX_LIST_WORDS,
    NONE,
    Logprobs,
    Needs,
    SamplerState,
    Workspace,
    bad_logits,
    entries,
    error_text,
    reason,
)
from kvasir.sampling.gumbel import log_exponential
from kvasir.sampling.philox import split_seed, token_words
from kvasir.sampling.rows import BadLogits, Sampled
from tests.examples import examples
from tests.sampling.test_native import KINDS, PLAIN, SEQUENCES, logits_of, row_context
from tests.sampling.test_sampler import context

CPU = "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, for infinities and NaN


@pytest.fixture(autouse=True, scope="module")
def quick():
    """The interpreter replaces the functions of triton.language at each call of a device function, for a millisecond.
    Once is enough."""
    scopes = [interpreter._patch_lang(fn) for fn in (tl.sum.fn, kernels.measure_tiles.fn)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "__call__", lambda self, *a, **k: self.rewrite()(*a, **k))
        yield
    for scope in reversed(scopes):
        scope.restore()


def sampled(x, contexts, tile=128, needs=None, padding=()):
    """As `sampler.sample`, by the kernels. padding: slots of these numbers have no row."""
    slots, vocab = len(contexts) + len(padding), x.shape[1]
    places = [i for i in range(slots) if i not in padding]
    logits = torch.full((slots, vocab + 3), math.nan)[:, :vocab]
    logits[places] = x
    state = SamplerState(len(contexts) + 2, vocab, CPU)
    work = Workspace(slots, vocab, CPU, tile)
    for buffer in vars(work).values():
        if isinstance(buffer, torch.Tensor):
            buffer.fill_(-7)
    rows, known = torch.full((slots,), -1, dtype=torch.int32), torch.full((slots,), -99, dtype=torch.int32)
    ids = torch.full((len(contexts) + 3, max([len(c.ids) for c in contexts], default=0) + 4), -5, dtype=torch.int32)
    mask_S, masks = torch.full((slots,), -1, dtype=torch.int32), []
    for n, (place, one) in enumerate(zip(places, contexts, strict=True)):
        row = len(contexts) - n  # rows in another order than slots
        state.enter(row, one.spec, one.prompt_len)
        rows[place], known[place] = row, len(one.ids)
        ids[row, : len(one.ids)] = torch.from_numpy(np.ascontiguousarray(one.ids))
        if one.mask is not None:
            mask_S[place] = len(masks)
            masks.append(one.mask)
    before = ids.clone()
    tokens, errors = torch.full((2, slots), -9, dtype=torch.int32)
    found = Logprobs(slots, CPU)
    needs = needs or state.needs([r for r in rows.tolist() if r >= 0], masked=bool(masks))
    words = max(map(len, masks), default=0)
    stacked = torch.from_numpy(np.stack([np.pad(m, (0, words - len(m))) for m in masks])) if masks else None
    kernels.sample(
        *(logits, rows, known, ids, state, work, tokens, errors),
        needs=needs,
        masks=stacked,
        mask_S=mask_S if masks else None,
        logprobs=found,
    )
    for place in padding:
        assert (tokens[place], errors[place]) == (-1, 0)
    for place, one in zip(places, contexts, strict=True):
        if not errors[place]:
            before[rows[place], len(one.ids)] = tokens[place]
    assert torch.equal(ids, before)
    asked = torch.full((slots,), -1)
    asked[places] = torch.tensor([c.spec.logprobs for c in contexts])
    results = entries(
        *(t.tolist() for t in (tokens, found.logprobs_S, found.ranks_S, found.best_ids_SK, found.best_logprobs_SK)),
        asked.tolist(),
        vocab,
    )
    return [
        Sampled(int(tokens[p]), results[p], one.carry, error_text(int(errors[p]), one.spec, vocab))
        for p, one in zip(places, contexts, strict=True)
    ]


def same(x, contexts, **how):
    """Compares by repr, in which -0.0 and 0.0 differ."""
    assert repr(sampled(x, contexts, **how)) == repr(sampler.sample(x, contexts))


def logits(kind, vocab, rows):
    return torch.from_numpy(np.stack([logits_of(kind, vocab, seed) for seed in range(rows)]))


@pytest.mark.parametrize(
    "kind",
    [k if k in ("normal", "zeros", "infinite", "huge") else pytest.param(k, marks=pytest.mark.slow) for k in KINDS],
)
def test_greedy_and_drawn_tokens(kind):
    specs = [
        SamplingSpec(),
        SamplingSpec(temperature=1.0, seed=5),
        SamplingSpec(temperature=0.1, seed=-1, min_p=0.1),
        SamplingSpec(temperature=100.0, seed=2**63 + 9),
        SamplingSpec(temperature=1e-6, min_p=1.0, seed=1),
        SamplingSpec(temperature=1.0, min_p=1.0, seed=1),
    ]
    contexts = [context(spec, range(i + 1), vocab=515) for i, spec in enumerate(specs)]
    same(logits(kind, 515, len(contexts)), contexts, padding=(0, 3))


HEADS = [
    {"top_k": 1},
    {"top_k": 30, "logprobs": 2},
    {"top_p": 1e-12},
    {"top_p": 0.7},
    {"top_p": 1 - 1e-16},
    {"top_k": 300, "top_p": 0.9},
    {"top_k": 9, "top_p": 0.5, "min_p": 0.01},
    {},
]


@pytest.mark.parametrize(
    ("kind", "few"),
    [
        pytest.param(kind, few, marks=() if kind in ("normal", "two") else pytest.mark.slow)
        for kind in KINDS
        for few in (False, True)
    ],
)
def test_heads_by_top_k_and_top_p(kind, few, monkeypatch):
    """few: so few bins, of so few tokens, that lists overflow and whole rows are read."""
    if few:
        monkeypatch.setattr(kernels, "BINS", 8)
        monkeypatch.setattr(kernels, "LISTED", 32)
    specs = [SamplingSpec(temperature=[0.5, 1.0, 100.0][i % 3], seed=i, **head) for i, head in enumerate(HEADS)]
    contexts = [context(spec, vocab=140, allowed=None if i % 4 else range(0, 140, 3)) for i, spec in enumerate(specs)]
    same(logits(kind, 140, len(contexts)), contexts)


IDS = st.integers(-2, 300)


@st.composite
def rows(draw):
    """As test_native's, of what the device samples."""
    chosen = dict(PLAIN)
    for group in (
        {"repetition_last_n": st.sampled_from([0, 1, 3, 2**31 - 1])},
        {"occurrence_last_n": st.sampled_from([-1, 1, 3, 2**31 - 1])},
        {"bad_words": SEQUENCES},
    ):
        chosen |= group if draw(st.booleans()) else {}
    ids = draw(st.lists(IDS, max_size=12) | st.lists(st.integers(0, 3), max_size=40))
    spec, mask = draw(st.builds(SamplingSpec, **chosen)), draw(st.none() | st.none() | st.integers(0, 99))
    return draw(st.sampled_from(KINDS)), draw(st.integers(0, 99)), spec, ids, draw(st.integers(0, len(ids))), mask, ()


@pytest.mark.parametrize("vocab", [97, 300])
def test_any_row(vocab):
    @examples(12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(st.lists(rows(), min_size=1, max_size=4))
    def run(cases):
        x = torch.from_numpy(np.stack([logits_of(kind, vocab, seed) for kind, seed, *_ in cases]))
        same(x, [row_context(vocab, *rest) for _, _, *rest in cases])

    run()


PROCESSED = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.1, "repetition_last_n": 3},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -2.0, "occurrence_last_n": -1},
    {"frequency_penalty": -0.1, "presence_penalty": 0.3, "repetition_penalty": 1.1, "occurrence_last_n": 4},
    {"logit_bias": ((3, 2.0), (130, -100.0), (3, 1.5), (0, 1e-40))},
    {"logit_bias": tuple((i, (i * 7 % 13) / 3) for i in range(140))},
    {"bad_words": ((5,), (6, 7, 8), (7, 9), (4, 6, 7, 10), (2**40,), (7, -1), (7, 139))},
    {"min_tokens": 40, "stop_ids": (1, 139, 10**12, -1)},
]


@pytest.mark.parametrize("kind", ["normal", "denormal", "infinite"])
def test_each_processor(kind):
    """Short ids and ids longer than a tile."""
    specs = [SamplingSpec(temperature=i % 2, seed=i, **one) for i, one in enumerate(PROCESSED)]
    contexts = [context(spec, (*range(130), 4, 3, 6, 7), 100, vocab=140) for spec in specs]
    contexts += [context(spec, (4, 6, 7), 2, vocab=140) for spec in specs[-3:]]
    same(logits(kind, 140, len(contexts)), contexts)


def test_log_probabilities_and_ranks():
    """With ties, with fewer tokens above -inf than asked, for more than the vocabulary."""
    for kind, most in (("integers", 5), ("holes", 128), ("infinite", 9), ("zeros", 9)):
        specs = [SamplingSpec(temperature=n % 2, seed=n, logprobs=n) for n in (0, 1, most)]
        same(logits(kind, 120, len(specs)), [context(spec, vocab=120) for spec in specs], tile=64)


def test_errors():
    x = logits("normal", 130, 7)
    x[0, 129] = math.nan
    x[1, 3] = -math.nan
    x[2] = -math.inf
    x[4] = math.nan
    all_ids = tuple((i, 1.0) for i in range(130))
    specs = [
        SamplingSpec(temperature=1.0, top_p=0.5, logprobs=3),
        SamplingSpec(),
        SamplingSpec(temperature=1.0, top_k=3, logit_bias=all_ids),
        SamplingSpec(min_tokens=9, stop_ids=tuple(range(130)), logprobs=0),
        SamplingSpec(logit_bias=((130, 1.0),)),
        SamplingSpec(logit_bias=((3, 1.0), (-1, 1.0)), temperature=1.0, top_p=0.5, logprobs=3),
        SamplingSpec(temperature=1.0),
    ]
    contexts = [context(spec, vocab=130, allowed=() if i == 6 else None) for i, spec in enumerate(specs)]
    found = sampled(x, contexts)
    assert all(one.error for one in found)
    assert repr(found) == repr(sampler.sample(x, contexts))


MIXED = [
    {},
    {"temperature": 1.0, "logprobs": 3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.3, "logprobs": 0},
]


def test_other_rows_launches_tiles_and_padding_change_no_bit():
    contexts = [context(SamplingSpec(seed=i, **spec), range(20), 9, vocab=150) for i, spec in enumerate(MIXED)]
    x = logits("normal", 150, len(contexts))
    alone = [sampled(x[i : i + 1], [one])[0] for i, one in enumerate(contexts)]
    assert alone == sampler.sample(x, contexts)
    for how in ({"needs": ALL}, {"tile": 64}, {"tile": 512, "padding": (1, 2, 6)}):
        assert sampled(x, contexts, **how) == alone
    order = [2, 0, 3, 1]
    assert sampled(x[order], [contexts[i] for i in order]) == [alone[i] for i in order]


def test_a_real_vocabulary():
    vocab = 151_936
    specs = [
        SamplingSpec(temperature=1.0, seed=3, logprobs=2),
        SamplingSpec(temperature=1.0, top_p=0.95, top_k=2000, seed=4),
        SamplingSpec(temperature=30.0, top_p=0.9, seed=2**64 - 1),
    ]
    x = torch.randn(len(specs), vocab, generator=torch.Generator().manual_seed(7)) * 3
    same(x, [context(spec, range(40), 30, vocab=vocab) for spec in specs], tile=2**16)


def test_a_rare_word_wins_from_far_below():
    """As test_gumbel's: this seed gives token 5 at position 100 the word 20."""
    spec = SamplingSpec(temperature=1.0, seed=111005114)
    key = [torch.tensor(word) for word in split_seed(spec.seed)]
    bar = log_exponential(token_words(key, torch.tensor(100), torch.tensor([0])))
    reach = float(log_exponential(torch.tensor([20])) - bar)
    for margin, winner in [(1e-4, 5), (-1e-4, 0)]:
        x = torch.full((1, 64), -math.inf)
        x[0, 0], x[0, 5] = 0.0, reach + margin
        contexts = [context(spec, [1] * 100, vocab=64)]
        assert sampled(x, contexts)[0].token == winner
        same(x, contexts)


@triton.jit
def apply(x, z, words, total, exponentials, bounds, weights, logs, N: tl.constexpr):
    i = tl.arange(0, N)
    word = tl.load(words + i).to(tl.uint32)
    tl.store(exponentials + i, arithmetic.log_exponential(word))
    tl.store(bounds + i, arithmetic.lower_bound(word))
    tl.store(weights + i, arithmetic.weights_of(tl.load(z + i)))
    tl.store(logs + i, arithmetic.log_of(tl.load(x + i)))


def test_the_arithmetic_is_the_reference_s():
    random = torch.Generator().manual_seed(3)
    n = 4096
    words = torch.randint(0, 2**32, (n,), generator=random) >> torch.randint(0, 32, (n,), generator=random)
    words[:8] = torch.tensor([0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])
    z = -torch.rand(n, generator=random, dtype=torch.float64) * 33
    z[:5] = torch.tensor([0.0, -0.0, -math.inf, -30.0, -1e300])
    x = torch.cat([torch.logspace(-300, 300, n - 8), 1 + torch.arange(-4, 4) * 2.0**-50]).double()
    x[0] = 2.0**-33
    x = x.clamp(1e-300, 1e300)
    reals, weights = torch.zeros(3, n, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)
    launch(apply, (1,), x, z, words, words, reals[0], reals[1], weights, reals[2], N=n)
    expected = log_exponential(words)
    assert torch.equal(reals[0], expected)
    assert (reals[1] < expected).all()
    assert torch.equal(weights, numerics.weights(z.clone()))
    assert torch.equal(reals[2], numerics.log(x))


def test_slots_of_one_row_at_several_positions():
    """Drafted ids: each slot sees the ids before its position."""
    vocab, ids, prompt_len = 64, [5, 6, 7, 8, 9, 9], 2
    spec = SamplingSpec(temperature=1.0, seed=9, frequency_penalty=2.0, repetition_penalty=1.5)
    x = logits("normal", vocab, 4)
    state, work = SamplerState(2, vocab, CPU), Workspace(4, vocab, CPU)
    state.enter(1, spec, prompt_len)
    known = [3, 4, 5, 6]
    table = torch.zeros(2, 8, dtype=torch.int32)
    table[1, :6] = torch.tensor(ids)
    tokens, errors = torch.zeros(2, 4, dtype=torch.int32)
    slots = [torch.tensor(of, dtype=torch.int32) for of in ([1] * 4, known)]
    kernels.sample(x, *slots, table, state, work, tokens, errors, needs=state.needs([1]))
    expected = sampler.sample(x, [context(spec, ids[:n], prompt_len, vocab=vocab) for n in known])
    assert tokens.tolist() == [one.token for one in expected]
    assert table[1].tolist() == [*ids[:3], *tokens.tolist(), 0]


@pytest.mark.parametrize("vocab", [5, 300])
def test_log_probabilities_of_known_ids(vocab):
    x = logits("normal", vocab, 5)
    x[1, :3] = x[1, 3]  # equal ones
    tokens, best = [0, 2, vocab - 1, 1, 3], [0, 3, 2, min(vocab + 4, 128), 1]
    expected = reference.logprobs(x, tokens, best)
    draws = Draws(torch.zeros(2, 8, dtype=torch.int32), 8, vocab)
    draws.asked.copy_(torch.from_numpy(asked_of(best, 8)))
    draws.tokens[:5] = torch.tensor(tokens)
    draws.tokens[5:] = -1
    padded = torch.cat([x, torch.full((3, vocab), math.nan)])
    draws.read(padded)
    keys, own, ranks, ids, values = (part.tolist() for part in draws.readings(5))
    assert [bad_logits(row) for row in keys] == [""] * 5
    assert entries(tokens, own, ranks, ids, values, best, vocab) == expected
    assert not draws.ids.any(), "reading has sampled"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_log_probabilities_of_bad_logits_are_refused_as_by_the_reference(value):
    x = logits("normal", 300, 2)
    x[1] = -math.inf
    x[1, 270] = value
    with pytest.raises(BadLogits) as caught:
        reference.logprobs(x, [0, 0], [1, 1])
    draws = Draws(torch.zeros(2, 8, dtype=torch.int32), 2, 300)
    draws.asked.copy_(torch.from_numpy(asked_of([1, 1], 2)))
    draws.read(x)
    keys = draws.readings(2)[0].tolist()
    assert [bad_logits(row) for row in keys] == ["", str(caught.value)]


def test_a_row_s_new_spec_replaces_the_old_one():
    vocab = 64
    state, work = SamplerState(1, vocab, CPU), Workspace(1, vocab, CPU)
    x = logits("normal", vocab, 1)
    tokens, errors, table = torch.zeros(1).int(), torch.zeros(1).int(), torch.tensor([[3, 4, 0, 0]], dtype=torch.int32)
    zero, known = torch.zeros(1).int(), torch.full((1,), 2).int()
    everything = SamplingSpec(
        temperature=1.0, top_k=3, logit_bias=((1, 90.0),), bad_words=((1, 2), (3,)), min_tokens=9, stop_ids=(5, 6)
    )
    for spec in (everything, SamplingSpec(), SamplingSpec(bad_words=((4, 7), (8,))), everything):
        state.enter(0, spec, 1)
        kernels.sample(x, zero, known, table, state, work, tokens, errors, needs=state.needs([0]))
        assert tokens.tolist() == [sampler.sample(x, [context(spec, [3, 4], 1, vocab=vocab)])[0].token]


@pytest.mark.parametrize(
    ("spec", "expected", "launches"),
    [
        (SamplingSpec(), NONE, 2),
        (SamplingSpec(top_k=5), NONE, 2),
        (SamplingSpec(temperature=1.0, min_p=0.1), Needs(True, False, False, False), 3),
        (SamplingSpec(temperature=1.0, top_k=5, presence_penalty=1.0), Needs(True, True, True, False), 6),
        (SamplingSpec(temperature=1.0, top_p=0.5, logprobs=0), Needs(True, True, False, True), 8),
        (SamplingSpec(min_tokens=3, stop_ids=(1,), logprobs=0), Needs(False, False, True, True), 4),
    ],
)
def test_launches_by_needs(spec, expected, launches):
    state, work = SamplerState(3, 100, CPU), Workspace(2, 100, CPU)
    state.enter(2, spec, 1)
    assert state.needs([2]) == expected
    assert state.needs([2], masked=True) == expected | Needs(False, False, True, False)
    assert state.needs([0, 1]) == NONE
    slots = torch.zeros(2, dtype=torch.int32)
    with recording(dry=True) as found:
        kernels.sample(
            *(torch.zeros(2, 100), slots, slots, torch.zeros(3, 9).int(), state, work, slots, slots),
            needs=state.needs([2]),
            logprobs=Logprobs(2, CPU),
        )
    assert len(found) == launches


HOST = [
    {"typical_p": 0.5},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 0.5},
    {"dynatemp_range": 0.5},
    {"mirostat": 2},
    {"adaptive_target": 0.5},
    {"dry_multiplier": 1.0},
    {"bad_words": (tuple(range(MAX_LIST_WORDS)),)},
    {"logprobs": 129},
]


@pytest.mark.parametrize("some", HOST)
def test_what_only_the_host_samples(some):
    spec = SamplingSpec(temperature=1.0, **some)
    assert reason(spec)
    with pytest.raises(ValueError, match=reason(spec)):
        SamplerState(1, 9, CPU).enter(0, spec, 0)
    greedy = dataclasses.replace(spec, temperature=0.0)
    assert bool(reason(greedy)) == (next(iter(some)) in ("dry_multiplier", "bad_words", "logprobs"))


def test_everything_else_is_sampled_there():
    assert reason(SamplingSpec(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, bad_words=((1,),), logprobs=128)) == ""


@pytest.mark.parametrize("vocab", [0, -1, 2**22 + 1])
def test_vocabularies_that_no_sampler_takes(vocab):
    with pytest.raises(ValueError, match="vocabulary"):
        SamplerState(1, vocab, CPU)
