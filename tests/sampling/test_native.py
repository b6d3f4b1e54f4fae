"""The sampler in C++ gives the reference's results in all bits, on every instruction set this machine has."""

import ctypes
import dataclasses
import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvasir.ops import native
from kvasir.plan import SamplingSpec
from kvasir.sampling.carry import carried, packed
from kvasir.sampling.logprobs import logprobs
from kvasir.sampling.native import MAX_LOGPROBS, Dry, NativeSampler, SampleRow, fill_spec
from kvasir.sampling.rows import BadLogits, RowContext
from kvasir.sampling.sampler import sample
from tests.examples import examples
from tests.isas import isas, restore_isa  # noqa: F401
from tests.sampling.oracle import bitmask
from tests.sampling.test_sampler import REAL, ROWS, VOCAB, batch, context

pytestmark = pytest.mark.skipif(not native.available(), reason=native.reason())


class Threads:
    """A pool for the length of a `with`."""

    def __init__(self, threads):
        self.threads = threads

    def __enter__(self):
        create = native.declare("kvasir_pool_create", ctypes.c_void_p, *[ctypes.c_int32] * 3)
        self.address = create(self.threads, 0, 0)
        return self

    def __exit__(self, *exc):
        native.declare("kvasir_pool_destroy", None, ctypes.c_void_p)(self.address)


def same_everywhere(x, rows, pool=None):
    """Every instruction set gives what the reference gives. By repr, which tells -0.0 from 0.0."""
    sampler = NativeSampler(x.shape[1], pool)
    expected = repr(sample(x, rows))
    for name in isas():
        native.force_isa(name)
        assert repr(sampler.sample(x, rows)) == expected, name


@examples(40, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(st.lists(ROWS, min_size=1, max_size=5))
def test_rows_with_all_that_a_spec_can_say(cases):
    same_everywhere(*batch(cases))


SIZES = [1, 2, 15, 16, 17, 33, 255, 256, 257, 1000, 4099, 32_003]
KINDS = ["normal", "flat", "steep", "integers", "equal", "two", "denormal", "zeros", "infinite", "huge", "holes"]


def logits_of(kind, vocab, seed):
    """One row of float32 logits of a kind that some part of the sampler may stumble over."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(vocab).astype(np.float32)
    if kind == "flat":
        x *= np.float32(0.01)
    elif kind == "steep":
        x *= np.float32(30)
    elif kind == "integers":
        x = np.rint(x * 3).astype(np.float32)
    elif kind == "equal":
        x[:] = x[0]
    elif kind == "two":
        x = np.where(x > 1, np.float32(3), np.float32(-3))
    elif kind == "denormal":
        x = (x * np.float32(3e-39)).astype(np.float32)
    elif kind == "zeros":
        x = np.where(x > 0, np.float32(0.0), np.float32(-0.0))
    elif kind == "infinite":
        x[random.random(vocab) < 0.02] = math.inf
        x[random.random(vocab) < 0.3] = -math.inf
    elif kind == "huge":
        x = np.clip(x, -3, 3) * np.float32(1.1e38)
    elif kind == "holes":
        x[random.random(vocab) < 0.97] = -math.inf
    return x


IDS = st.integers(-2, 1100)
FEW = st.integers(0, 3)
SEQUENCES = st.lists(st.lists(FEW | IDS, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
PLAIN = {
    "temperature": st.sampled_from([0.0, 1e-5, 0.01, 0.3, 0.7, 1.0, 2.5, 100.0]),
    "top_p": st.sampled_from([1.0, 1.0, 1 - 1e-16, 0.999, 0.95, 0.5, 0.01, 1e-12]),
    "top_k": st.sampled_from([-1, 0, 0, 0, 1, 2, 7, 20, 63, 64, 65, 300, 999, 2**31 - 1]),
    "min_p": st.sampled_from([0.0, 0.0, 1e-300, 0.001, 0.1, 0.9, 1.0]),
    "presence_penalty": st.sampled_from([0.0, 0.0, 0.3, -2.0]),
    "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7, -0.1]),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.1, 1.0 + 1e-9]),
    "logit_bias": st.lists(st.tuples(IDS, st.floats(-100, 100)), max_size=3).map(tuple),
    "seed": st.integers(-(2**63), 2**64 - 1),
    "min_tokens": st.sampled_from([0, 0, 5]),
    "stop_ids": st.lists(IDS, max_size=3).map(tuple),
    "logprobs": st.sampled_from([-1, -1, 0, 1, 5, MAX_LOGPROBS]),
}
# Each group is there or not, so that most pairs of them meet.
OPTIONS = [
    {"typical_p": st.sampled_from([1e-12, 0.1, 0.5, 0.95, 1 - 1e-16])},
    {"top_n_sigma": st.sampled_from([1e-9, 0.3, 1.0, 2.5, 1000.0])},
    {
        "xtc_probability": st.sampled_from([0.0, 0.5, 1.0]),
        "xtc_threshold": st.sampled_from([0.0, 1e-6, 0.02, 0.1, 0.5, 0.6]),
    },
    {
        "dynatemp_range": st.sampled_from([0.01, 0.5, 100.0]),
        "dynatemp_exponent": st.sampled_from([0.0, 0.5, 1.0, 100.0]),
    },
    {
        "mirostat": st.just(2),
        "mirostat_tau": st.sampled_from([0.0, 0.5, 5.0, 100.0]),
        "mirostat_eta": st.sampled_from([0.0, 0.1, 10.0]),
    },
    {
        "adaptive_target": st.sampled_from([-0.5, 0.0, 0.2, 1.0]),
        "adaptive_decay": st.sampled_from([0.0, 0.9, 0.99]),
    },
    {"repetition_last_n": st.sampled_from([-1, 0, 1, 3, 2**31 - 1])},
    {"occurrence_last_n": st.sampled_from([-1, 0, 1, 3, 2**31 - 1])},
    {"bad_words": SEQUENCES},
    {
        "dry_multiplier": st.sampled_from([0.0, 0.8, 30.0, 1000.0]),
        "dry_base": st.sampled_from([1.0, 1.75, 1000.0]),
        "dry_allowed_length": st.sampled_from([0, 1, 2, 2**31 - 1]),
        "dry_penalty_last_n": st.sampled_from([-1, 0, 1, 2, 7, 2**31 - 1]),
        "dry_breakers": st.lists(st.integers(0, 40), max_size=2).map(lambda ids: bitmask(ids, 41).tobytes()),
        "dry_breaker_sequences": SEQUENCES,
    },
]


@st.composite
def specs(draw):
    chosen = dict(PLAIN)
    for group in draw(st.lists(st.sampled_from(OPTIONS), max_size=3)):
        chosen |= group
    return draw(st.builds(SamplingSpec, **chosen))


STATES = st.sampled_from([(), (-1.0, 1.0), (0.0, 1.0), (0.7, 9.0), (3.0, 5.0), (11.0, 10.0), (1e9, 2.0)])


@st.composite
def rows(draw):
    """(kind, seed of the logits, spec, ids, prompt_len, seed of the mask or None, carried numbers)."""
    ids = draw(st.lists(IDS, max_size=12) | st.lists(FEW, max_size=40) | st.integers(0, 70).map(lambda n: [2] * n))
    mask = draw(st.none() | st.none() | st.integers(0, 99))
    prompt_len = draw(st.integers(0, len(ids)))
    return draw(st.sampled_from(KINDS)), draw(st.integers(0, 99)), draw(specs()), ids, prompt_len, mask, draw(STATES)


def row_context(vocab, spec, ids, prompt_len, mask, state):
    words = None
    if mask is not None:
        random = np.random.default_rng(mask)
        words = random.integers(-(2**31), 2**31, random.integers(1, vocab // 32 + 3), np.int64).astype(np.int32)
        if mask % 3 == 0:
            words[random.random(len(words)) > 0.1] = 0
    inside = tuple((i % vocab if i >= 0 and (mask or 1) % 5 else i, value) for i, value in spec.logit_bias)
    spec = dataclasses.replace(spec, logit_bias=inside)
    carry = packed(state[: len(carried(spec, b""))]) if spec.carries else b"c"
    return RowContext(spec, np.array(ids, np.int32), prompt_len, len(ids), words, carry)


@pytest.mark.parametrize("vocab", SIZES)
def test_any_row_of_any_size(vocab):
    @examples(25 if vocab < 2000 else 8)
    @given(st.lists(rows(), min_size=1, max_size=3))
    def run(cases):
        x = torch.from_numpy(np.stack([logits_of(kind, vocab, seed) for kind, seed, *_ in cases]))
        same_everywhere(x, [row_context(vocab, *rest) for _, _, *rest in cases])

    run()


FULL = [
    *REAL,
    SamplingSpec(temperature=0.7, top_p=0.95, top_k=20, logprobs=5),
    SamplingSpec(temperature=1.0, top_k=20_000, top_p=0.5, logprobs=64),
    SamplingSpec(temperature=1.0, top_p=0.999, min_p=0.01),
    SamplingSpec(temperature=100.0, top_p=0.999),
    SamplingSpec(temperature=1.0, typical_p=0.7),
    SamplingSpec(temperature=0.8, typical_p=0.95, top_p=0.9, min_p=0.001),
    SamplingSpec(temperature=1.0, top_n_sigma=1.0, top_p=0.99),
    SamplingSpec(temperature=1.0, xtc_probability=1.0, xtc_threshold=1e-5, top_k=5000),
    SamplingSpec(temperature=1.2, dynatemp_range=0.9, dynatemp_exponent=0.7),
    SamplingSpec(temperature=1.0, mirostat=2, mirostat_tau=6.0),
    SamplingSpec(temperature=1.0, adaptive_target=0.1),
    SamplingSpec(
        temperature=1.0, dry_multiplier=0.8, dry_penalty_last_n=-1, repetition_penalty=1.1, repetition_last_n=7
    ),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "vocab"),
    [
        *[("normal", 50_257), ("equal", 50_257), ("steep", 50_257), ("integers", 151_936), ("infinite", 50_257)],
        *(pytest.param(kind, 151_936, marks=pytest.mark.slow) for kind in ("normal", "equal", "steep", "infinite")),
        pytest.param("integers", 50_257, marks=pytest.mark.slow),
    ],
)
def test_a_whole_vocabulary(vocab, kind):
    x = torch.from_numpy(np.stack([logits_of(kind, vocab, i) for i in range(len(FULL))]))
    same_everywhere(x, [context(dataclasses.replace(s, seed=i), range(40), 30) for i, s in enumerate(FULL)])


def test_other_rows_threads_and_strides_change_no_bit():
    vocab = 10_007
    contexts = [context(dataclasses.replace(s, seed=i), range(40), 30) for i, s in enumerate(FULL)]
    wide = torch.full((len(FULL), vocab + 3), math.nan)
    x = wide[:, 1 : vocab + 1]
    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * 3)
    before = x.clone()
    sampler = NativeSampler(vocab)
    alone = [sampler.sample(x[i : i + 1], [row])[0] for i, row in enumerate(contexts)]
    for threads in (1, 2, 3, 5, 40):
        with Threads(threads) as pool:
            for count in (1, 2, 3, len(FULL)):  # few rows are split, many are shared out
                assert NativeSampler(vocab, pool).sample(x[:count], contexts[:count]) == alone[:count]
    assert sampler.sample(x[:1].expand(3, -1), contexts[:1] * 3) == alone[:1] * 3
    assert sampler.sample(x.T.contiguous().T, contexts) == alone
    assert sampler.sample(x.numpy(), contexts) == sampler.sample(x.double().numpy(), contexts) == alone
    assert torch.equal(x, before)
    same_everywhere(before.half(), contexts)


@pytest.mark.parametrize("vocab", [5, 300, 5000])
def test_a_bad_row_fails_alone(vocab):
    x = torch.randn(8, vocab, generator=torch.Generator().manual_seed(6))
    x[1, vocab - 1], x[4], x[6, 0], x[6, 1] = math.nan, -math.inf, math.inf, math.nan
    made = [SamplingSpec(temperature=t, logprobs=1, seed=8, top_p=p) for t, p in [(0, 1), (1, 1), (1, 0.8)] * 3]
    contexts = [context(spec, [1, 2], 1, carry=bytes([i])) for i, spec in enumerate(made[:8])]
    for i, bias in [(2, vocab), (5, 2**40), (7, -1)]:
        spec = dataclasses.replace(made[i], logit_bias=((1, 1.0), (bias, 1.0)))
        contexts[i] = context(spec, [1, 2], 1, carry=bytes([i]))
    contexts[3] = context(made[3], [1, 2], 1, set(), vocab, b"\3")
    same_everywhere(x, contexts)
    with Threads(16) as pool:
        same_everywhere(x, contexts, pool)
    results = NativeSampler(vocab).sample(x, contexts)
    assert [r.token >= 0 for r in results] == [True] + [False] * 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_forbidden_or_all_but_one(temperature):
    spec = SamplingSpec(temperature=temperature, min_tokens=9, stop_ids=tuple(range(VOCAB)), logprobs=2)
    one = dataclasses.replace(spec, stop_ids=tuple(i for i in range(VOCAB) if i != 33))
    x = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(7))
    same_everywhere(x, [context(spec), context(one)])
    forbidden, lonely = NativeSampler(VOCAB).sample(x, [context(spec), context(one)])
    assert "allowed" in forbidden.error
    assert lonely.token == 33


def test_denormal_logits_are_distinguished():
    x = torch.tensor([[0.0, 1e-40, 2e-40, -1e-40]])
    for temperature in (0.0, 1.0):
        same_everywhere(x, [context(SamplingSpec(temperature=temperature, logprobs=4))])
    assert NativeSampler(4).sample(x, [context(SamplingSpec())])[0].token == 2


@pytest.mark.slow
def test_the_draw_has_the_distribution():
    """The noise is the reference's, so a few thousand seeds suffice to see that no token is screened out wrongly."""
    vocab, count = 3000, 3000
    x = torch.zeros(1, vocab).expand(count, -1)
    contexts = [context(SamplingSpec(temperature=1.0, seed=i)) for i in range(count)]
    tokens = [r.token for r in NativeSampler(vocab).sample(x, contexts)]
    assert tokens == [r.token for r in sample(x, contexts)]
    assert 1700 < len(set(tokens)) < 2100  # vocab * (1 - 1/e) = 1896


@pytest.mark.parametrize("depth", [-8.0, -11.0, -14.0])
def test_a_sea_of_unlikely_tokens(depth):
    """Together they are about as likely as the one peak: what is left out by z alone must be right."""
    vocab = int(math.exp(-depth)) if depth > -10 else 50_257
    x = torch.full((1, vocab), depth).expand(24, -1).clone()
    x[:, 1234] = 0.0
    contexts = [context(SamplingSpec(temperature=1.0, seed=i)) for i in range(24)]
    same_everywhere(x, contexts)
    unlikely = sum(r.token != 1234 for r in NativeSampler(vocab).sample(x, contexts))
    assert unlikely > 4 or depth < -12


def test_separate_samplers_run_concurrently():
    vocab = 20_000
    x = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3))
    contexts = [context(SamplingSpec(temperature=1.0, top_p=0.9, logprobs=3, seed=i)) for i in range(8)]
    expected = [sample(x, [row]) for row in contexts]
    found: list = [None] * len(contexts)

    def work(i):
        sampler = NativeSampler(vocab)
        found[i] = [sampler.sample(x, [contexts[i]]) for _ in range(20)]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(contexts))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [[results] * 20 for results in expected]


def test_arguments_are_checked():
    sampler = NativeSampler(5)
    assert sampler.sample(torch.zeros(0, 5), []) == []
    for logits in (torch.zeros(2, 5), torch.zeros(1, 6), torch.zeros(5)):
        with pytest.raises(ValueError, match="contexts"):
            sampler.sample(logits, [context(SamplingSpec())])
    for spec in (SamplingSpec(logprobs=129), SamplingSpec(prompt_logprobs=129)):
        with pytest.raises(ValueError, match="128"):
            sampler.sample(torch.zeros(1, 5), [context(spec)])
    for vocab in (0, -1, 2**22 + 1):
        with pytest.raises(ValueError, match=f"{vocab}"):
            NativeSampler(vocab)


def test_a_spec_is_complete():
    """Every field of a SamplingSpec reaches the native sampler."""
    elsewhere = {"logit_bias", "stop_ids", "prompt_logprobs", "guided", "dry_breaker_sequences", "dry_penalty_last_n"}
    elsewhere.add("carries")
    names = {f.name for f in dataclasses.fields(SamplingSpec)} - elsewhere
    given = {name for name, _ in SampleRow._fields_} | {f"dry_{name}" for name, _ in Dry._fields_}
    assert names <= given
    target = SampleRow()
    kept = fill_spec(target, SamplingSpec(logit_bias=((3, 1.0), (3, 0.5)), stop_ids=(1, 2), seed=-1), 4)
    assert (target.num_bias, target.num_stop_ids, target.seed, target.prompt_len) == (1, 2, 2**64 - 1, 4)
    assert len(kept) >= 3


@examples(25)
@given(st.data(), st.sampled_from(SIZES))
def test_known_tokens_are_described_as_the_reference_does(data, vocab):
    count = data.draw(st.integers(1, 5))
    kinds, tokens = st.sampled_from(KINDS), st.integers(0, vocab - 1)
    x = torch.from_numpy(np.stack([logits_of(data.draw(kinds), vocab, i) for i in range(count)]))
    chosen = data.draw(st.lists(tokens, min_size=count, max_size=count))
    best = data.draw(st.lists(st.sampled_from([0, 1, 5, 128]), min_size=count, max_size=count))
    try:
        expected = repr(logprobs(x, chosen, best))
    except BadLogits:
        expected = None
    for name in isas():
        native.force_isa(name)
        if expected is None:
            with pytest.raises(BadLogits, match="-inf"):
                NativeSampler(vocab).describe(x, chosen, best)
        else:
            assert repr(NativeSampler(vocab).describe(x, chosen, best)) == expected, name


@pytest.mark.few(1)
@pytest.mark.parametrize("repeated", [[7], [7, 8], list(range(64))])
def test_dry_over_a_hostile_text_is_the_reference_s(repeated):
    """The same ids again and again, over thousands of them, beside breakers that begin with them and never come."""
    ids = (repeated * 4096)[:4096]
    never = tuple((7, *[7] * i, 9) for i in range(20))
    spec = SamplingSpec(dry_multiplier=0.8, dry_penalty_last_n=-1, dry_breaker_sequences=never)
    same_everywhere(torch.randn(1, 100), [context(spec, ids)])
    broken = dataclasses.replace(spec, dry_breaker_sequences=(*never, tuple(ids[-5:-2]), (ids[-5],)))
    same_everywhere(torch.randn(1, 100), [context(broken, ids)])
