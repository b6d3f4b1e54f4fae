"""top-k, top-p and min-p against the slow oracle and against transformers."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvasir.plan import SamplingSpec
from kvasir.sampling import filters
from kvasir.sampling.filters import listed, min_p_, needs_list, scaled
from tests.examples import examples
from tests.sampling import oracle

# Eighths, so that ties are common; exact in float32.
LOGITS = st.lists(st.integers(-80, 80).map(lambda n: n / 8) | st.just(-math.inf), min_size=1, max_size=60)
SPECS = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.5, 1.0, 2.0, 7.3, 0.01, 100.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 30, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.1, 1e-9, 0.999]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0, 1e-6]),
)


def survivors(row, spec):
    """Ids that may be drawn, as the sampler finds them."""
    x = torch.tensor([row], dtype=torch.float32)
    peak = x.amax(-1, keepdim=True)
    if not needs_list(spec, len(row)):
        return [t for t, z in enumerate(min_p_(scaled(x, peak, [spec]), [spec])[0].tolist()) if z > -math.inf]
    ids, z = listed(x, peak, [spec])
    return [t for t, v in zip(ids[0].tolist(), z[0].tolist(), strict=True) if v > -math.inf]


def on_an_edge(row, spec):
    """Whether rounding decides: the mass at some head, or a token's ratio, is within 1e-9 of the bound."""
    finite = [t for t in oracle.order(row) if row[t] > -math.inf]
    z = [(row[t] - row[finite[0]]) / spec.temperature for t in finite]
    heads = z[: spec.top_k] if spec.top_k > 0 else z
    total = math.fsum(math.exp(v) for v in heads)
    sums = [math.fsum(math.exp(v) for v in heads[:n]) / total for n in range(1, len(heads) + 1)]
    near_p = spec.top_p < 1 and any(abs(s - spec.top_p) < 1e-9 for s in sums)
    return near_p or any(0 < abs(math.exp(v) - spec.min_p) < 1e-9 for v in z)


@examples(150)
@given(LOGITS, SPECS)
def test_kept_ids_equal_the_oracle(row, spec):
    assume(max(row) > -math.inf and not on_an_edge(row, spec))
    assert sorted(survivors(row, spec)) == sorted(oracle.kept(row, spec)[0])


@given(LOGITS, SPECS)
def test_the_best_token_always_stays_and_the_kept_are_a_head_of_the_order(row, spec):
    assume(max(row) > -math.inf)
    kept = survivors(row, spec)
    assert sorted(kept) == sorted(oracle.order(row)[: len(kept)])
    assert len(kept) >= 1


@given(LOGITS, SPECS)
def test_neutral_values_filter_nothing(row, spec):
    assume(max(row) > -math.inf)
    finite = [t for t, v in enumerate(row) if v > -math.inf]
    for top_k in (-1, 0, len(row), 10**9):
        neutral = SamplingSpec(temperature=spec.temperature, top_k=top_k, top_p=1.0, min_p=0.0)
        assert not needs_list(neutral, len(row))
        assert survivors(row, neutral) == finite
    # With another row's filters in the same list, too.
    x = torch.tensor([row, row], dtype=torch.float32)
    specs = [SamplingSpec(temperature=spec.temperature), SamplingSpec(temperature=1.0, top_p=0.5)]
    _, z = listed(x, x.amax(-1, keepdim=True), specs)
    assert (z[0] > -math.inf).sum() == len(finite)


def test_ties_keep_the_lower_ids():
    row = [1.0, 2.0, 2.0, 2.0, 1.0]
    assert survivors(row, SamplingSpec(temperature=1.0, top_k=2)) == [1, 2]
    assert survivors(row, SamplingSpec(temperature=1.0, top_k=4)) == [1, 2, 3, 0]
    assert survivors([0.0] * 8, SamplingSpec(temperature=1.0, top_p=0.5)) == [0, 1, 2, 3]
    assert survivors(row, SamplingSpec(temperature=1.0, min_p=1.0)) == [1, 2, 3]


def test_top_p_counts_the_mass_that_top_k_left_and_min_p_comes_last():
    row = [math.log(p) for p in (0.5, 0.2, 0.2, 0.1)]
    assert survivors(row, SamplingSpec(temperature=1.0, top_p=0.69)) == [0, 1]
    assert survivors(row, SamplingSpec(temperature=1.0, top_p=0.69, top_k=2)) == [0]  # 0.5 of 0.7
    # vLLM's order would take the nucleus of what min-p left, 0.5 of 0.9, and keep one token.
    assert survivors(row, SamplingSpec(temperature=1.0, top_p=0.54, min_p=0.3)) == [0, 1]


@pytest.mark.parametrize("first", [1, 3, 1000])
def test_the_length_of_the_first_list_does_not_show(first, monkeypatch):
    x = torch.randn(5, 5000, generator=torch.Generator().manual_seed(0)) * 2
    specs = [SamplingSpec(temperature=t, top_p=p) for t, p in [(1, 0.9), (1, 0.1), (5, 0.999), (0.3, 0.5), (1, 0.99)]]
    expected = [survivors(row, spec) for row, spec in zip(x.tolist(), specs, strict=True)]
    assert len(expected[2]) > 4000 and len(expected[3]) < 5
    monkeypatch.setattr(filters, "FIRST_LIST", first)
    ids, z = listed(x, x.amax(-1, keepdim=True), specs)
    for i, own in enumerate(expected):
        assert ids[i][z[i] > -math.inf].tolist() == own


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(temperature=0.7, top_k=40),
        SamplingSpec(temperature=1.3, top_p=0.95),
        SamplingSpec(temperature=1.0, min_p=0.02),
        SamplingSpec(temperature=0.6, top_k=20, top_p=0.95),
        SamplingSpec(temperature=1.5, top_k=500, top_p=0.9, min_p=0.05),
    ],
)
def test_same_as_transformers_on_logits_without_ties(spec):
    import transformers as tf

    x = torch.randn(8, 4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    warpers = [tf.TemperatureLogitsWarper(spec.temperature)]
    warpers += [tf.TopKLogitsWarper(spec.top_k)] if spec.top_k else []
    warpers += [tf.TopPLogitsWarper(spec.top_p)] if spec.top_p < 1 else []
    warpers += [tf.MinPLogitsWarper(spec.min_p)] if spec.min_p else []
    x = x.float().double()
    theirs = x
    for warper in warpers:
        theirs = warper(None, theirs)
    for row, scores in zip(x.tolist(), theirs, strict=True):
        assert sorted(survivors(row, spec)) == torch.nonzero(scores > -math.inf)[:, 0].tolist()
