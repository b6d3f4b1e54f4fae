"""The sampler against the slow oracle; a row is a function of itself; one bad row fails alone."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from kvasir.plan import SamplingSpec
from kvasir.sampling import logprobs as room
from kvasir.sampling.logprobs import logprobs
from kvasir.sampling.rows import RowContext
from kvasir.sampling.sampler import sample
from tests.examples import examples
from tests.sampling import oracle
from tests.sampling.test_filters import on_an_edge

VOCAB = 50
TOKENS = st.integers(0, VOCAB - 1)
LOGITS = st.lists(st.integers(-64, 64).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)
SPECS = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7, 100.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    top_k=st.sampled_from([0, 1, 3, 20]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.25]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (4, -100.0))]),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.sampled_from([0, 4]),
    stop_ids=st.sampled_from([(), (1, 2)]),
    logprobs=st.sampled_from([-1, 0, 3]),
)
ROWS = st.tuples(LOGITS, SPECS, st.lists(TOKENS, min_size=1, max_size=9), st.none() | st.sets(TOKENS, min_size=9))


def context(spec, ids=(1, 2, 3), prompt_len=1, allowed=None, vocab=VOCAB, carry=b""):
    mask = None if allowed is None else oracle.bitmask(allowed, vocab)
    return RowContext(spec, np.array(ids, np.int32), prompt_len, len(ids), mask, carry)


def batch(cases):
    """(logits, contexts) of a list of ROWS."""
    logits = torch.tensor([row for row, *_ in cases], dtype=torch.float32)
    return logits, [context(spec, ids, 1, allowed) for _, spec, ids, allowed in cases]


@examples(120, suppress_health_check=[HealthCheck.data_too_large])
@given(ROWS)
def test_the_token_is_the_oracle_s(case):
    row, spec, ids, allowed = case
    if spec.temperature:
        x = [float(v) for v in oracle.process(row, spec, ids, 1, allowed)]
        assume(max(x) > -math.inf and not on_an_edge(x, spec))
    result = sample(*batch([case]))[0]
    assert result.error == ""
    assert result.token == oracle.token(row, spec, ids, 1, allowed)
    if spec.logprobs < 0:
        assert result.logprob is None
    else:
        assert result.logprob == logprobs(torch.tensor([row]), [result.token], [spec.logprobs])[0]


@examples(30, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(st.lists(ROWS, min_size=2, max_size=7), st.randoms(use_true_random=False))
def test_permuting_rows_permutes_results_and_batching_changes_none(cases, random):
    alone = [sample(*batch([case]))[0] for case in cases]
    assert sample(*batch(cases)) == alone
    order = list(range(len(cases)))
    random.shuffle(order)
    assert sample(*batch([cases[i] for i in order])) == [alone[i] for i in order]


FILTERS = [
    {},
    {"top_k": 3},
    {"top_k": 20},
    {"top_p": 0.05},
    {"top_p": 0.7},
    {"min_p": 0.99},
    {"top_k": 9, "min_p": 0.98},
]


def test_filters_of_one_row_do_not_reach_another():
    """Flat rows, where each filter leaves other tokens than none: any pair in one call, in both orders."""
    x = torch.linspace(0, 3, VOCAB).repeat(2, 1)
    specs = [SamplingSpec(temperature=100.0, seed=s, **f) for s, f in enumerate(FILTERS)] + [SamplingSpec()]
    alone = [sample(x[:1], [context(spec)])[0] for spec in specs]
    for i, first in enumerate(specs):
        for j, second in enumerate(specs):
            assert sample(x, [context(first), context(second)]) == [alone[i], alone[j]]


REAL = [
    SamplingSpec(),
    SamplingSpec(logprobs=4),
    SamplingSpec(repetition_penalty=1.2, presence_penalty=0.5, logprobs=2),
    SamplingSpec(temperature=1.0, logprobs=0),
    SamplingSpec(temperature=0.7, top_p=0.9, logprobs=4),
    SamplingSpec(temperature=3.0, top_p=0.995),
    SamplingSpec(temperature=0.6, top_k=20, top_p=0.95),
    SamplingSpec(temperature=1.0, top_k=1000, logprobs=20),
    SamplingSpec(temperature=1.2, min_p=0.05),
    SamplingSpec(temperature=30.0, seed=2**64 - 1),
    SamplingSpec(temperature=1.0, frequency_penalty=1.0, logit_bias=((5, 50.0),)),
]


@pytest.mark.parametrize("vocab", [10_007, 151_936])
def test_other_rows_threads_chunks_and_strides_change_no_bit(vocab, monkeypatch):
    specs = [dataclasses.replace(s, seed=s.seed + i) for i, s in enumerate(REAL)]
    rows = [context(spec, range(40), 30, vocab=vocab) for spec in specs]
    x = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    before = x.clone()
    alone = [sample(x[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert [r.error for r in alone] == [""] * len(rows)
    wider = torch.full((len(rows), vocab + 3), math.nan)
    wider[:, 1 : vocab + 1] = x
    for chunk, threads, logits in [(4, 2, x), (64, 1, wider[:, 1 : vocab + 1])]:
        monkeypatch.setattr(room, "CPU_ROWS", chunk)
        torch.set_num_threads(threads)
        assert sample(logits, rows) == alone
    assert torch.equal(x, before)


def test_logprobs_of_the_fast_path_have_the_bits_of_the_slow_one():
    x = torch.randn(1, 50_257, generator=torch.Generator().manual_seed(5)) * 3
    fast = sample(x, [context(SamplingSpec(logprobs=5))])[0]
    for spec in (
        SamplingSpec(logprobs=5, temperature=1.0, top_k=1),
        SamplingSpec(logprobs=5, repetition_penalty=1.0 + 1e-9),
        SamplingSpec(logprobs=5, temperature=1e-6),
    ):
        assert sample(x, [context(spec)])[0] == fast
    assert sample(x, [context(SamplingSpec(logprobs=5), allowed=set(range(50_257)), vocab=50_257)])[0] == fast


@given(LOGITS, st.integers(0, 2**64 - 1), st.sampled_from([0.01, 1.0, 100.0]))
def test_narrow_filters_equal_greedy(row, seed, temperature):
    logits = torch.tensor([row], dtype=torch.float32)
    greedy = sample(logits, [context(SamplingSpec())])[0].token
    assert greedy == oracle.order(row)[0]
    for narrow in ({"top_k": 1}, {"top_p": 1e-12}, {"top_k": 40, "top_p": 1e-12}):
        assert sample(logits, [context(SamplingSpec(temperature=temperature, seed=seed, **narrow))])[0].token == greedy


@given(LOGITS, st.integers(0, 2**64 - 1), st.sampled_from([0.3, 1.0, 100.0]))
def test_wide_filters_change_nothing(row, seed, temperature):
    """The noise belongs to the token: found by a list or by screening, the same one is drawn."""
    logits = torch.tensor([row], dtype=torch.float32)
    plain = SamplingSpec(temperature=temperature, seed=seed)
    wide = [
        {},
        {"top_k": -1},
        {"top_k": VOCAB},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1e-300},
        {"top_p": 1 - 1e-16},
    ]
    rows = [context(dataclasses.replace(plain, **values)) for values in wide]
    assert len({r.token for r in sample(logits.expand(len(wide), -1), rows)}) == 1


def test_seed_and_position_choose_and_nothing_else():
    flat = torch.zeros(1, 1000).expand(200, -1)
    spec = SamplingSpec(temperature=1.0)

    def tokens(contexts):
        return [r.token for r in sample(flat, contexts)]

    same = tokens([context(dataclasses.replace(spec, seed=3), [i, 5], 1) for i in range(200)])
    assert len(set(same)) == 1
    for many in (
        tokens([context(dataclasses.replace(spec, seed=i)) for i in range(200)]),
        tokens([context(dataclasses.replace(spec, seed=i << 32)) for i in range(200)]),
        tokens([context(dataclasses.replace(spec, seed=3), [0] * i) for i in range(200)]),
    ):
        assert len(set(many)) > 150


def test_temperature_limits():
    x = torch.tensor([[0.0, 1.0, 1.0 + 2.0**-20, -50.0]]).expand(64, -1)

    def tokens(temperature):
        return {r.token for r in sample(x, [context(SamplingSpec(temperature=temperature, seed=i)) for i in range(64)])}

    assert tokens(1e-9) == tokens(5e-324) == {2}
    assert tokens(1e-5) <= {1, 2}
    assert tokens(0.01) == {1, 2}
    assert tokens(100.0) == {0, 1, 2, 3}
    extreme = torch.tensor([[3e38, -3e38, 2.9e38]])
    for temperature in (1e-5, 1.0, 100.0):
        assert sample(extreme, [context(SamplingSpec(temperature=temperature, logprobs=3))])[0].token == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_infinities(temperature, filters):
    inf = math.inf
    spec = SamplingSpec(temperature=temperature, logprobs=2, **filters)
    rows = [context(dataclasses.replace(spec, seed=i)) for i in range(40)]
    tokens = [r.token for r in sample(torch.tensor([[9.0, inf, -inf, inf, 3e38]]).expand(40, -1), rows)]
    assert set(tokens) == ({1} if temperature == 0.0 else {1, 3})
    lonely = sample(torch.tensor([[-inf, -inf, -5.0, -inf]]).expand(40, -1), rows)
    assert {r.token for r in lonely} == {2} and {r.logprob[1] for r in lonely} == {0.0}


def test_a_bad_row_fails_alone():
    x = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(6))
    specs = [SamplingSpec(temperature=t, logprobs=1, seed=8, top_p=p) for t, p in [(0, 1), (1, 1), (1, 0.8)] * 2]
    rows = [context(spec, carry=bytes([i])) for i, spec in enumerate(specs)]
    sound = sample(x, rows)
    x[1, 7], x[4] = math.nan, -math.inf
    rows[2] = context(dataclasses.replace(specs[2], logit_bias=((VOCAB, 1.0),)), carry=b"\2")
    rows[3] = context(specs[3], allowed=set(), carry=b"\3")
    mixed = sample(x, rows)
    assert (mixed[0], mixed[5]) == (sound[0], sound[5])
    for i, text in [(1, "NaN"), (2, "names token 50"), (3, "allowed"), (4, "-inf")]:
        assert mixed[i].token == -1 and mixed[i].logprob is None and text in mixed[i].error
    assert [r.carry for r in mixed] == [bytes([i]) for i in range(6)]


def test_nan_at_a_masked_id_is_still_an_error():
    x = torch.zeros(1, VOCAB)
    x[0, 7] = math.nan
    assert "NaN" in sample(x, [context(SamplingSpec(), allowed={1, 2})])[0].error


def test_shapes_are_checked_and_no_rows_are_no_work():
    assert sample(torch.zeros(0, 5), []) == []
    with pytest.raises(ValueError, match=r"2 rows.* 1"):
        sample(torch.zeros(2, 5), [context(SamplingSpec())])
    with pytest.raises(ValueError, match="beyond"):
        sample(torch.zeros(1, 1).expand(1, 2**22 + 1), [context(SamplingSpec())])
