"""The filters beyond top-k, top-p and min-p against plain numpy; what is neutral changes no bit; mirostat's mu."""

import dataclasses
import math
import struct

import pytest
import torch
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from kvasir.plan import SamplingSpec
from kvasir.sampling import chain
from kvasir.sampling import logprobs as room
from kvasir.sampling.chain import needs_chain
from kvasir.sampling.filters import listed
from kvasir.sampling.numerics import entropy, tree_sum
from kvasir.sampling.sampler import sample
from tests.examples import examples
from tests.sampling import chain_oracle as oracle
from tests.sampling.test_sampler import VOCAB, context

LOGITS = st.lists(st.integers(-64, 64).map(lambda n: n / 16) | st.just(-math.inf), min_size=VOCAB, max_size=VOCAB)
OF_THE_CHAIN = {
    "top_n_sigma": st.sampled_from([0.3, 1.0, 2.5]),
    "typical_p": st.sampled_from([0.1, 0.5, 0.95]),
    "xtc_probability": st.sampled_from([0.5, 1.0]),
    "dynatemp_range": st.sampled_from([0.3, 1.0, 5.0]),
    "mirostat": st.just(2),
}
OTHERS = {
    "temperature": st.sampled_from([0.5, 1.0, 1.7]),
    "top_k": st.sampled_from([0, 0, 3, 20]),
    "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.4]),
    "min_p": st.sampled_from([0.0, 0.0, 0.05]),
    "xtc_threshold": st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    "dynatemp_exponent": st.sampled_from([0.5, 1.0, 3.0]),
    "mirostat_tau": st.sampled_from([0.5, 2.0, 5.0]),
    "mirostat_eta": st.sampled_from([0.1, 1.0]),
    "seed": st.integers(0, 2**64 - 1),
}
CHOSEN = st.fixed_dictionaries(OTHERS, optional=OF_THE_CHAIN)
SPECS = CHOSEN.map(lambda fields: SamplingSpec(**fields)).filter(needs_chain)
MUS = st.none() | st.floats(-2.0, 12.0)


def rows_of(logits):
    return torch.tensor(logits, dtype=torch.float32)


@examples(70, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(LOGITS, SPECS, MUS)
def test_token_and_carry_are_the_oracle_s(row, spec, mu):
    assume(max(row) > -math.inf)
    spread = [v + 1e-4 * t for t, v in enumerate(row)]
    x = rows_of([spread])
    carry = b"" if mu is None else struct.pack("<d", mu)
    before = 2 * spec.mirostat_tau if mu is None else mu
    try:
        token, after = oracle.drawn(x[0].tolist(), spec, 3, before)
    except oracle.OnAnEdge:
        assume(False)
    result = sample(x, [context(spec, carry=carry)])[0]
    assert (result.error, result.token) == ("", token)
    if spec.mirostat:
        assert struct.unpack("<d", result.carry)[0] == pytest.approx(after, abs=1e-8)
    else:
        assert result.carry == carry


@examples(20, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(st.lists(st.tuples(LOGITS, CHOSEN.map(lambda f: SamplingSpec(**f)), MUS), min_size=2, max_size=5))
def test_other_rows_change_no_bit(cases):
    x = rows_of([row for row, *_ in cases])
    rows = [context(spec, carry=b"" if mu is None else struct.pack("<d", mu)) for _, spec, mu in cases]
    alone = [sample(x[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert sample(x, rows) == alone
    assert sample(x.flip(0), rows[::-1]) == alone[::-1]


@examples(40, suppress_health_check=[HealthCheck.data_too_large])
@given(LOGITS, st.fixed_dictionaries(OTHERS))
def test_neutral_values_leave_the_bits_of_the_plain_filters(row, fields):
    assume(max(row) > -math.inf)
    spec = SamplingSpec(**{**fields, "xtc_threshold": 0.1})
    assert not needs_chain(spec)
    x = rows_of([row])
    peak = x.amax(-1, keepdim=True)
    left = chain.narrowed(x[0], peak[0], spec, 3, ())
    ids, z = listed(x, peak, [spec])
    kept = z[0] > -math.inf
    place = ids[0][kept].argsort()
    assert left.ids_N.tolist() == ids[0][kept][place].tolist()
    assert torch.equal(left.z_N, z[0][kept][place])
    plain = sample(x, [context(spec)])[0]
    for nearly in (
        {"top_n_sigma": 1e6},
        {"typical_p": 1 - 1e-16},
        {"mirostat": 2, "mirostat_tau": 100.0, "mirostat_eta": 0.0},
        {"dynatemp_range": 1e-300, "temperature": 1.0},
        {"top_n_sigma": 0.0, "xtc_probability": 1.0, "xtc_threshold": 0.500001},
    ):
        changed = dataclasses.replace(spec, **nearly)
        expected = sample(x, [context(dataclasses.replace(spec, temperature=changed.temperature))])[0]
        assert sample(x, [context(changed)])[0].token == expected.token
    assert sample(x, [context(dataclasses.replace(spec, mirostat_tau=1.0, dynatemp_exponent=2.0))])[0] == plain


def survivors(row, position=3, mu=0.0, **fields):
    x = rows_of(row)
    spec = SamplingSpec(**{"temperature": 1.0, **fields})
    return chain.narrowed(x, x.amax(-1, keepdim=True), spec, position, (mu,)).ids_N.tolist()


ROW = [math.log(p) for p in (0.4, 0.3, 0.15, 0.1, 0.05)]


def test_each_filter_by_hand():
    assert survivors([4.0, 2.0, 0.0, -2.0, -math.inf], top_n_sigma=0.9) == [0, 1]  # sigma of 4 2 0 -2 is 2.236
    assert survivors([4.0, 2.0, 0.0, -2.0], top_n_sigma=0.8) == [0]
    # Entropy 1.39: surprises 0.92, 1.20, 1.90, 2.30, 3.00 lie 0.48, 0.19, 0.50, 0.91, 1.60 away.
    assert survivors(ROW, typical_p=0.2) == [1]
    assert survivors(ROW, typical_p=0.6) == [0, 1]
    assert survivors(ROW, typical_p=0.8) == [0, 1, 2]
    assert survivors(ROW, xtc_probability=1.0, xtc_threshold=0.12) == [2, 3, 4]
    assert survivors(ROW, xtc_probability=1.0, xtc_threshold=0.35) == [0, 1, 2, 3, 4]  # the only one stays
    assert survivors([1.0] * 4, xtc_probability=1.0, xtc_threshold=0.2) == [3]  # the last of equal ones
    assert survivors(ROW, mirostat=2, mu=2.0) == [0, 1]  # bits: 1.32, 1.74, 2.74
    assert survivors(ROW, mirostat=2, mu=-1.0) == [0]
    # What one leaves is what the next one sees: 0.3 of 0.7 is above 0.4, of 1 it is not.
    assert survivors(ROW, top_k=2, xtc_probability=1.0, xtc_threshold=0.4) == [1]
    assert survivors(ROW, xtc_probability=1.0, xtc_threshold=0.4) == [0, 1, 2, 3, 4]


def test_dynamic_temperature_goes_from_its_low_to_its_high():
    def temperature_of(row, **fields):
        x = rows_of(row)
        spec = SamplingSpec(**{"temperature": 1.0, "dynatemp_range": 0.5, **fields})
        left = chain.narrowed(x, x.amax(-1, keepdim=True), spec, 3, ())
        return (row[1] - row[0]) / float(left.z_N[1] - left.z_N[0])

    assert temperature_of([0.0, 1e-6] + [0.0] * 8) == pytest.approx(1.5)
    assert temperature_of([20.0, 0.0, 0.0]) == pytest.approx(0.5, abs=1e-4)
    p = 1 / (1 + math.exp(-1))
    share = -(p * math.log(p) + (1 - p) * math.log(1 - p)) / math.log(2)
    assert temperature_of([1.0, 0.0], dynatemp_exponent=2.0) == pytest.approx(0.5 + share**2)
    assert temperature_of([1.0, 0.0], temperature=0.2, dynatemp_range=1.0) == pytest.approx(1.2 * share)


def test_xtc_acts_as_often_as_asked_by_seed_and_position_alone():
    spec = SamplingSpec(temperature=1.0, xtc_probability=0.3, xtc_threshold=0.1)
    count = 800
    for acts in (
        [chain.xtc_acts(spec, position) for position in range(count)],
        [chain.xtc_acts(dataclasses.replace(spec, seed=seed), 7) for seed in range(count)],
    ):
        assert abs(sum(acts) - 0.3 * count) < 5 * math.sqrt(0.21 * count)
    assert chain.xtc_acts(dataclasses.replace(spec, xtc_probability=1.0), 5)
    assert not chain.xtc_acts(dataclasses.replace(spec, xtc_probability=0.0), 5)


@pytest.mark.parametrize("tau", [pytest.param(1.0, marks=pytest.mark.slow), 3.0])
def test_mirostat_brings_the_mean_surprise_to_tau(tau):
    x = -1.1 * torch.arange(1, 2001).log()
    peak = x.amax(-1, keepdim=True)
    p = x.double().softmax(0)
    spec = SamplingSpec(temperature=1.0, mirostat=2, mirostat_tau=tau, seed=4)
    carry, surprise = b"", 0.0
    for position in range(300):
        mu = struct.unpack("<d", carry)[0] if carry else 2 * tau
        left = p[-p.log2() <= mu]
        total = float(left.sum()) if len(left) else float(p[0])
        token, carry = chain.choose(x, peak, spec, position, carry)
        surprise -= math.log2(float(p[token]) / total) / 300
    assert abs(surprise - tau) < 0.25


ADAPTIVE = {
    "adaptive_target": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    "adaptive_decay": st.sampled_from([0.0, 0.9, 0.99]),
}


@examples(40, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.filter_too_much])
@given(LOGITS, st.fixed_dictionaries(OTHERS | ADAPTIVE), st.none() | st.tuples(st.floats(0, 5), st.floats(1, 9)))
def test_adaptive_p_and_its_carry_are_the_oracle_s(row, fields, state):
    assume(max(row) > -math.inf)
    spec, x = SamplingSpec(**fields), rows_of([row])
    kept = 1 - spec.adaptive_decay
    try:
        token, after = oracle.drawn_adaptively(
            x[0].tolist(), spec, 3, (spec.adaptive_target / kept, 1 / kept) if state is None else state
        )
    except oracle.OnAnEdge:
        assume(False)
    result = sample(x, [context(spec, carry=b"" if state is None else struct.pack("<2d", *state))])[0]
    assert (result.error, result.token) == ("", token)
    assert struct.unpack("<2d", result.carry) == pytest.approx(after, rel=1e-8)


@pytest.mark.parametrize("target", [0.1, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.2, 0.5))])
def test_adaptive_p_keeps_the_mean_probability_near_its_target(target):
    x = torch.tensor([0.55, 0.2, 0.1, *[0.01] * 15]).log()
    spec = SamplingSpec(temperature=1.0, adaptive_target=target, seed=4)
    carry, mean, p = b"", 0.0, x.double().softmax(0)
    for position in range(300):
        token, carry = chain.choose(x, x.amax(-1, keepdim=True), spec, position, carry)
        mean += float(p[token]) / 300
    assert abs(mean - target) < 0.1 < abs(float(p @ p) - target)


def test_mirostat_takes_the_place_of_adaptive_p():
    x = rows_of([[1.0, 0.5, 0.0, -1.0]])
    mirostat = SamplingSpec(temperature=1.0, mirostat=2, seed=3)
    both = dataclasses.replace(mirostat, adaptive_target=0.1)
    assert sample(x, [context(both)]) == sample(x, [context(mirostat)])
    off = SamplingSpec(temperature=1.0, adaptive_target=-0.5, seed=3)
    assert sample(x, [context(off)]) == sample(x, [context(dataclasses.replace(off, adaptive_target=-1.0))])


BIG = [
    {"adaptive_target": 0.1},
    {"top_n_sigma": 1.0},
    {"typical_p": 0.9},
    {"top_k": 100, "xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"dynatemp_range": 0.9, "top_p": 0.95},
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"typical_p": 0.5, "top_p": 0.8, "min_p": 0.01, "mirostat": 2, "dynatemp_range": 0.1, "top_n_sigma": 3.0},
]


@pytest.mark.few(1)
@pytest.mark.parametrize("vocab", [10_007, 151_936])
def test_threads_chunks_and_strides_change_no_bit(vocab, monkeypatch):
    rows = [
        context(SamplingSpec(temperature=1.1, seed=i, logprobs=2, **fields), range(40), 30, vocab=vocab)
        for i, fields in enumerate(BIG)
    ]
    x = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    before = x.clone()
    alone = [sample(x[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    wider = torch.full((len(rows), vocab + 3), math.nan)
    wider[:, 1 : vocab + 1] = x
    for chunk, threads, logits in [(4, 2, x), (64, 1, wider[:, 1 : vocab + 1])]:
        monkeypatch.setattr(room, "CPU_ROWS", chunk)
        torch.set_num_threads(threads)
        assert sample(logits, rows) == alone
    assert torch.equal(x, before)


@pytest.mark.parametrize("fields", BIG)
def test_infinities_and_greedy(fields):
    inf = math.inf
    spec = SamplingSpec(temperature=1.0, **fields)
    rows = [context(dataclasses.replace(spec, seed=i)) for i in range(20)]
    tokens = {r.token for r in sample(torch.tensor([[9.0, inf, -inf, inf, 3e38]]).expand(20, -1), rows)}
    assert 2 not in tokens
    assert tokens <= {1, 3} or {"xtc_probability", "adaptive_target"} & fields.keys()  # these may take others
    assert {r.token for r in sample(torch.tensor([[-inf, -inf, -5.0, -inf]]).expand(20, -1), rows)} == {2}
    row = torch.tensor([[1.0, 7.0, 7.0, -1.0]])
    greedy = sample(row, [context(dataclasses.replace(spec, temperature=0.0), carry=b"\1")])[0]
    assert (greedy.token, greedy.carry) == (1, b"\1")


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=70))
def test_the_tree_adds_up(values):
    assert float(tree_sum(torch.tensor(values, dtype=torch.float64))) == pytest.approx(math.fsum(values), abs=1e-9)


@given(st.lists(st.floats(-25, 0), min_size=1, max_size=70))
def test_entropy(values):
    z = torch.tensor(values, dtype=torch.float64)
    z -= z.amax()
    p = z.softmax(0)
    log_total, found = entropy(z)
    assert float(found) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-9)
    assert float(log_total) == pytest.approx(float(z.logsumexp(0)), abs=1e-9)
